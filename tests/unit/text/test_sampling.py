"""Parameters → what the workers know: rules, logprobs, samples, and the refusals that need a vocabulary."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fakes.tokenizers import ids_of_bytes
from minisgl_backend.errors import InvalidRequest
from minisgl_backend.messages.sampling import NO_LOGPROBS, TokenRules
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.text.parameters import SamplingParams, parse_parameters
from minisgl_backend.text.sampling import check_ids, resolve_sampling, token_rules
from minisgl_backend.text.tokenizer import Tokenizer


def parse(**values: Any) -> SamplingParams:
    return parse_parameters(json.dumps(values).encode())


def rules(tokenizer: Tokenizer, ends: tuple[int, ...] = (2,), **values: Any) -> TokenRules | None:
    return token_rules(parse(**values), tokenizer, ends)


def test_who_asks_for_nothing_has_no_rules(byte_level: Tokenizer) -> None:
    assert rules(byte_level) is None
    assert rules(byte_level, logit_bias={}, presence_penalty=0, repetition_penalty=1, bad_words=[""]) is None
    assert rules(byte_level, ends=(), min_tokens=5) is None, "nothing ends the answer anyway"


def test_each_parameter_becomes_its_rule(byte_level: Tokenizer) -> None:
    assert rules(byte_level, presence_penalty=1, frequency_penalty=-1, repetition_penalty=2) == TokenRules(
        1.0, -1.0, 2.0
    )
    assert rules(byte_level, logit_bias={"9": 1, "3": -2}) == TokenRules(
        bias_ids=pack_tokens([3, 9]), biases=(-2.0, 1.0)
    )
    assert rules(byte_level, allowed_token_ids=[9, 3, 9]) == TokenRules(allowed_ids=pack_tokens([3, 9]))
    assert rules(byte_level, ends=(7, 2), min_tokens=4) == TokenRules(min_tokens=4, held_ids=pack_tokens([2, 7]))


def test_a_bad_word_is_banned_with_and_without_a_space_before_it(byte_level: Tokenizer) -> None:
    fox, spaced = byte_level.encode("fox"), byte_level.encode(" fox")
    got = rules(byte_level, bad_words=["fox", " fox"])
    assert got is not None
    expected = [fox] if len(fox) != len(spaced) else [fox, spaced]
    assert list(got.bad_words) == [pack_tokens(word) for word in expected]
    space_e = rules(byte_level, bad_words="é")
    assert space_e is not None and pack_tokens(ids_of_bytes(byte_level, "é".encode())) in space_e.bad_words


def test_a_bad_word_without_tokens_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"^bad_words: must be made of the model's tokens; that at position 1"):
        rules(byte_level, bad_words=["fox", "  "])


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
def test_ids_beyond_the_vocabulary_are_refused_with_their_place(field: str) -> None:
    check_ids(parse(**{field: [0, 383]}), 384)
    with pytest.raises(InvalidRequest, match=f"^{field}: must be from 0 to 383, got 384 at position 1$"):
        check_ids(parse(**{field: [0, 384]}), 384)


def test_a_bias_beyond_the_vocabulary_is_refused() -> None:
    check_ids(parse(logit_bias={"383": 1}), 384)
    with pytest.raises(InvalidRequest, match=r"^logit_bias: must have keys from 0 to 383, got 384$"):
        check_ids(parse(logit_bias={"384": 1}), 384)


def test_rules_that_may_leave_nothing_to_draw_are_refused(byte_level: Tokenizer) -> None:
    (a,) = byte_level.encode("a")
    too_much: list[dict[str, Any]] = [
        {"allowed_token_ids": [a], "bad_words": ["a"]},
        {"allowed_token_ids": [2], "min_tokens": 1},
        {"allowed_token_ids": [2, a], "min_tokens": 1, "bad_words": "a"},
    ]
    for values in too_much:
        with pytest.raises(InvalidRequest, match=r"^allowed_token_ids: may leave nothing to draw, together with"):
            rules(byte_level, **values)
    assert rules(byte_level, allowed_token_ids=[2, a], min_tokens=1) is not None
    with pytest.raises(InvalidRequest, match=r"^min_tokens: may leave nothing to draw"):
        rules(byte_level, ends=tuple(range(byte_level.vocab_size)), min_tokens=1)


def test_logprobs_are_asked_for_by_the_parameter_or_for_their_sum_alone() -> None:
    assert resolve_sampling(parse(), 384, 0).logprobs == NO_LOGPROBS
    assert resolve_sampling(parse(logprobs=0), 384, 0).logprobs == 0
    assert resolve_sampling(parse(), 384, 0, logprobs=True).logprobs == 0
    assert resolve_sampling(parse(logprobs=5), 384, 0, logprobs=True).logprobs == 5
    assert resolve_sampling(parse(logprobs=20, prompt_logprobs=20), 7, 0).logprobs == 7, "no more than there are"
    assert resolve_sampling(parse(logprobs=20, prompt_logprobs=20), 7, 0).prompt_logprobs == 7


def test_greedy_has_no_min_p_and_keeps_its_rules() -> None:
    got = resolve_sampling(parse(temperature=0, min_p=0.5), 384, 0, TokenRules(presence_penalty=1.0))
    assert (got.min_p, got.rules) == (0.0, TokenRules(presence_penalty=1.0))
