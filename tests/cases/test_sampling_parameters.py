"""Reported faults of other servers, class "sampling parameters", and the empty stop string.

SP-01 sgl-project/sglang PR #28153; SP-06 sgl-project/sglang#40076, #31597; SP-09 torch-spyre/sendnn-inference#542;
SP-10 vllm-project/vllm#33418; ST-04 sgl-project/sglang PR #38712.
"""

from __future__ import annotations

import pytest

from fakes.text_requests import validate_request
from minisgl_backend.errors import InvalidRequest, UnsupportedFeature
from minisgl_backend.messages.client import Request
from minisgl_backend.messages.ids import RequestId
from minisgl_backend.text.limits import RequestLimits
from minisgl_backend.text.parameters import parse_parameters
from minisgl_backend.text.request import Accepted
from minisgl_backend.text.sampling import resolve_sampling
from minisgl_backend.text.tokenizer import Tokenizer

CONTEXT = 32
LIMITS = RequestLimits(context_tokens=CONTEXT, pool_tokens=4096)


def accepted(tokenizer: Tokenizer, prompt: str, parameters: str = "") -> Accepted:
    request = Request(RequestId(1), prompt.encode(), parameters.encode(), True, None)
    return validate_request(request, tokenizer, LIMITS, lambda: 0)


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "1e308", "1e999", "-0.1", '"NaN"', '"inf"', '"1e999"']
)
def test_sp_01_a_temperature_that_is_no_usable_number_is_refused(byte_level: Tokenizer, value: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^temperature: must be a number in \[0, 100\]"):
        accepted(byte_level, "hi", f'{{"temperature": {value}}}')
    assert accepted(byte_level, "hi").sampling.temperature == 1.0


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ('{"top_logprobs": 1000000}', "top_logprobs"),
        ('{"logprobs": -1}', "logprobs"),
        ('{"logprobs": 21}', "logprobs"),
        ('{"prompt_logprobs": 21}', "prompt_logprobs"),
        ('{"n": 5000000}', "n"),
        ('{"n": 0}', "n"),
    ],
)
def test_sp_06_huge_counts_are_refused_at_once(byte_level: Tokenizer, parameters: str, named: str) -> None:
    with pytest.raises((InvalidRequest, UnsupportedFeature), match=f"^{named}: "):
        accepted(byte_level, "hi", parameters)


V = 384


@pytest.mark.parametrize(("top_k", "expected"), [(-1, 0), (0, 0), (V, 0), (V + 100, 0), (V - 1, V - 1)])
def test_sp_09_top_k_beyond_its_limits_is_no_limit(top_k: int, expected: int) -> None:
    sampling = resolve_sampling(parse_parameters(f'{{"top_k": {top_k}}}'.encode()), V, 0)
    assert (sampling.top_k, sampling.temperature) == (expected, 1.0)


def test_sp_09_top_k_1_is_greedy() -> None:
    assert resolve_sampling(parse_parameters(b'{"top_k": 1, "temperature": 2}'), V, 0).temperature == 0


@pytest.mark.parametrize("top_p", ["0", "1.5", "-1", "NaN", '"0"'])
def test_sp_09_top_p_outside_its_range_is_refused(top_p: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^top_p: must be a number in \(0, 1\]"):
        parse_parameters(f'{{"top_p": {top_p}}}'.encode())


def test_sp_09_a_tiny_top_p_is_the_best_token_and_min_p_goes_from_0_to_1() -> None:
    assert resolve_sampling(parse_parameters(b'{"top_p": 1e-9}'), V, 0).temperature == 0
    assert resolve_sampling(parse_parameters(b'{"top_p": 1}'), V, 0).top_p == 1
    assert parse_parameters(b'{"min_p": 0}') == parse_parameters(b"")
    assert resolve_sampling(parse_parameters(b'{"min_p": 1}'), V, 0).min_p == 1
    with pytest.raises(InvalidRequest, match=r"^min_p: must be a number in \[0, 1\]"):
        parse_parameters(b'{"min_p": 1.5}')


@pytest.mark.parametrize(("given", "with_one_left"), [("1", 1), ("2", 1), (None, 1), (str(10 * CONTEXT), 1)])
def test_sp_10_max_tokens_is_clipped_to_what_the_context_leaves(
    byte_level: Tokenizer, given: str | None, with_one_left: int
) -> None:
    parameters = "{}" if given is None else f'{{"max_tokens": {given}}}'
    got = accepted(byte_level, "Q" * (CONTEXT - 1), parameters)
    assert (got.num_input_tokens, got.max_new_tokens) == (CONTEXT - 1, with_one_left)
    short = accepted(byte_level, "QQ", parameters)
    assert short.max_new_tokens == min(int(given or 16), CONTEXT - 2)


@pytest.mark.parametrize("tokens", [CONTEXT, CONTEXT + 1])
@pytest.mark.parametrize("max_tokens", [1, 10 * CONTEXT])
def test_sp_10_and_sc_10_a_prompt_that_fills_the_context_is_refused_with_the_true_numbers(
    byte_level: Tokenizer, tokens: int, max_tokens: int
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        accepted(byte_level, "Q" * tokens, f'{{"max_tokens": {max_tokens}}}')
    assert str(caught.value) == (
        f"text_input: the prompt is too long: {tokens} tokens; "
        f"the context of {CONTEXT} tokens takes prompts of at most {CONTEXT - 1}"
    )


def test_sp_10_no_tokens_at_all_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"^max_tokens: must be an integer from 1 to"):
        accepted(byte_level, "hi", '{"max_tokens": 0}')


@pytest.mark.parametrize("field", ["stop", "stop_words"])
def test_st_04_an_empty_stop_string_is_no_word_and_ends_nothing(byte_level: Tokenizer, field: str) -> None:
    """Not refused, as case ST-04 would have it: Triton's clients pad lists with empty strings."""
    for nothing in ('""', '[""]', "[]", "null", '["", ""]'):
        assert accepted(byte_level, "hi", f'{{"{field}": {nothing}}}').stop == ()
    assert accepted(byte_level, "hi", f'{{"{field}": ["END", ""]}}').stop == ("END",)
    for words in ("[0]", "false", '[["a"]]', '{"a": 1}'):
        with pytest.raises(InvalidRequest, match=f"^{field}: must "):
            accepted(byte_level, "hi", f'{{"{field}": {words}}}')
