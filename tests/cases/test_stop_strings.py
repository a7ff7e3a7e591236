"""Reported faults of other servers, class "stop strings and stop ids", at the level of the text room.

ST-01 vllm-project/vllm#3574, #2577; ST-02 vllm-project/vllm PR #3672; ST-07 vllm-project/vllm#14170; ST-08
vllm-project/vllm#4589, PR #5849. ST-04 stands in test_sampling_parameters.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fakes.text_requests import take_output, validate_request
from fakes.tokenizers import byte_level_folder, ids_of_bytes
from minisgl_backend.messages.client import Chunk, Finished, FinishReason, Request
from minisgl_backend.messages.engine import EndReason
from minisgl_backend.messages.ids import RequestId, SequenceId
from minisgl_backend.messages.tokens import unpack_tokens
from minisgl_backend.text.limits import RequestLimits
from minisgl_backend.text.record import Record
from minisgl_backend.text.request import Accepted
from minisgl_backend.text.tokenizer import Tokenizer

LIMITS = RequestLimits(context_tokens=4096, pool_tokens=4096)


def accepted(tokenizer: Tokenizer, stream: bool, **parameters: Any) -> Accepted:
    raw = json.dumps({"max_tokens": 1000, **parameters}).encode()
    request = Request(RequestId(1), b"Say:", raw, stream, exclude_input_in_output=True)
    return validate_request(request, tokenizer, LIMITS, lambda: 0)


def pieces(tokenizer: Tokenizer, ids: list[int], stream: bool, **parameters: Any) -> tuple[list[str], FinishReason]:
    """The texts of the outputs, one token per step, and the reason."""
    record = Record(RequestId(1), accepted(tokenizer, stream, **parameters), tokenizer, 0.0)
    texts: list[str] = []
    for token in ids:
        record.on_token(token)
        output = take_output(record)
        if isinstance(output, Chunk | Finished):
            texts.append(output.text)
        if isinstance(output, Finished):
            return texts, output.reason
    record.on_end(EndReason.LENGTH)
    end = take_output(record)
    assert isinstance(end, Finished)
    return [*texts, end.text], end.reason


def words(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_st_01_no_part_of_a_stop_string_that_spans_tokens_leaks(byte_level: Tokenizer) -> None:
    script = [
        *words(byte_level, "one"),
        *words(byte_level, " red"),
        *words(byte_level, " green"),
        *words(byte_level, " blue"),
    ]
    texts, reason = pieces(byte_level, script, True, stop=["red green blue"])
    assert ("".join(texts), reason) == ("one ", FinishReason.STOP)
    assert all("one ".startswith("".join(texts[: count + 1])) for count in range(len(texts)))


def test_st_01_what_was_held_comes_as_soon_as_no_stop_can_match(byte_level: Tokenizer) -> None:
    script = ids_of_bytes(byte_level, b"one red grape")
    texts, reason = pieces(byte_level, script, True, stop=["red green blue"])
    assert texts == ["o", "n", "e", " ", "", "", "", "", "", "", "red gra", "p", "e", ""]
    assert reason is FinishReason.LENGTH


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("include", "expected"), [(False, "xyz"), (True, "xyz}]")])
def test_st_02_a_stop_string_that_ends_inside_a_token_leaves_nothing_behind_it(
    byte_level: Tokenizer, stream: bool, include: bool, expected: str
) -> None:
    import copy

    tokenizer, token = copy.copy(byte_level), byte_level.vocab_size - 1
    tokenizer.shown_bytes = [*byte_level.shown_bytes]
    tokenizer.shown_bytes[token] = b"xyz}]\n\n"
    texts, reason = pieces(tokenizer, [token], stream, stop=["}]"], include_stop_str_in_output=include)
    assert ("".join(texts), reason) == (expected, FinishReason.STOP)


@pytest.mark.parametrize("stream", [True, False])
def test_st_07_a_stop_string_counts_wherever_it_stands_thinking_or_not(byte_level: Tokenizer, stream: bool) -> None:
    """The rule: the whole text, thinking included, in both modes. A client that means the answer names another stop."""
    script = ids_of_bytes(byte_level, b"<think>Is 7.9 more?</think>7.9 is")
    texts, reason = pieces(byte_level, script, stream, stop=["7.9"])
    assert ("".join(texts), reason) == ("<think>Is ", FinishReason.STOP)


def test_st_08_every_end_token_of_the_model_counts_for_the_end_for_ignore_eos_and_for_min_tokens(
    tmp_path: Path,
) -> None:
    a, b = 2, 300
    folder = byte_level_folder(tmp_path, generation_config={"eos_token_id": [a, b]})
    tokenizer = Tokenizer.load(folder)
    assert accepted(tokenizer, True).stop_token_ids == (a, b)
    texts = pieces(tokenizer, [*ids_of_bytes(tokenizer, b"hi"), b], False)[0]
    assert texts == ["hi"], "and the text of b is not shown"
    assert accepted(tokenizer, True, ignore_eos=True, max_tokens=8).stop_token_ids == ()
    rules = accepted(tokenizer, True, min_tokens=5).sequence(SequenceId(1), 0.0).sampling.rules
    assert rules is not None and (rules.min_tokens, list(unpack_tokens(rules.held_ids))) == (5, [a, b])
