"""Reported faults of other servers, class "streaming detokenization", at the level of the text room.

DT-03 huggingface/text-generation-inference#333, #131; DT-04 triton-inference-server/tensorrtllm_backend#332;
DT-05 sgl-project/sglang#580; DT-06 vllm-project/vllm#17448; DT-08 NVIDIA/TensorRT-LLM PR #14312.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fakes.text_requests import feed, take_output, validate_request
from fakes.tokenizers import ids_of_bytes
from minisgl_backend.messages.client import Chunk, Finished, FinishReason, Request
from minisgl_backend.messages.engine import EndReason
from minisgl_backend.messages.ids import RequestId, SequenceId
from minisgl_backend.text.limits import RequestLimits
from minisgl_backend.text.record import Record
from minisgl_backend.text.tokenizer import Tokenizer

LIMITS = RequestLimits(context_tokens=4096, pool_tokens=4096)
FAMILY = "👨‍👩‍👧"  # three emoji and two zero-width joiners: 18 bytes


def record(tokenizer: Tokenizer, stream: bool = True, prompt: str = "Say:") -> Record:
    request = Request(RequestId(1), prompt.encode(), b'{"max_tokens": 4000}', stream, exclude_input_in_output=True)
    return Record(RequestId(1), validate_request(request, tokenizer, LIMITS, lambda: 0), tokenizer, 0.0)


def deltas(tokenizer: Tokenizer, ids: list[int], interval: int = 1, **options: Any) -> list[str]:
    """The texts of the outputs when an output is taken after every `interval` tokens."""
    r, texts = record(tokenizer, **options), []
    for start in range(0, len(ids), interval):
        feed(r, ids[start : start + interval])
        output = take_output(r)
        if isinstance(output, Chunk):
            texts.append(output.text)
    r.on_end(EndReason.LENGTH)
    end = take_output(r)
    assert isinstance(end, Finished) and end.reason is FinishReason.LENGTH
    return [*texts, end.text]


@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("text", ["😀", "가나", FAMILY, f"a{FAMILY}b😀"])
def test_dt_03_characters_that_span_tokens_arrive_whole(tokenizer: Tokenizer, text: str, interval: int) -> None:
    pieces = deltas(tokenizer, ids_of_bytes(tokenizer, text.encode()), interval)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


WORDS = " jumps over the lazy dog    four\n\ttab"


@pytest.mark.parametrize("stream", [True, False])
def test_dt_04_streamed_words_keep_their_spaces(tokenizer: Tokenizer, stream: bool) -> None:
    prompt = "Say: the quick brown fox"
    whole, ids = tokenizer.encode(prompt + WORDS), tokenizer.encode(prompt)
    answer = whole[len(ids) :]
    assert whole[: len(ids)] == ids, "the words must start at a token"
    assert "".join(deltas(tokenizer, answer, stream=stream, prompt=prompt)) == WORDS


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens", ["one", "four"])
def test_dt_05_text_before_a_character_cut_by_the_end_is_delivered(
    byte_level: Tokenizer, stream: bool, tokens: str
) -> None:
    data = b"the smile\xf0\x9f"
    if tokens == "one":
        special = byte_level.vocab_size - 1
        table = [*byte_level.shown_bytes]
        table[special] = data
        tokenizer, ids = _with_table(byte_level, table), [special]
    else:
        tokenizer, ids = byte_level, [*byte_level.encode("the smile"), *ids_of_bytes(byte_level, b"\xf0\x9f")]
    text = "".join(deltas(tokenizer, ids, stream=stream))
    assert text == "the smile\ufffd"  # one U+FFFD in both modes
    assert msgspec.json.decode(msgspec.json.encode(text)) == text


def _with_table(tokenizer: Tokenizer, table: list[bytes]) -> Tokenizer:
    """The same tokenizer with other bytes behind its ids: for a token that no training would give."""
    import copy

    other = copy.copy(tokenizer)
    other.shown_bytes = table
    return other


def test_dt_06_bytes_that_are_never_valid_spoil_only_their_own_answer(tokenizer: Tokenizer) -> None:
    normal = tokenizer.encode(" the quick brown", add_special_tokens=False)
    odd = ids_of_bytes(tokenizer, bytes.fromhex("80BF80E441F080"))
    scripts = {SequenceId(i): odd if i == 2 else normal for i in range(4)}
    records = {i: record(tokenizer) for i in scripts}
    texts = dict.fromkeys(scripts, "")
    for step in range(max(map(len, scripts.values()))):
        for i, script in scripts.items():
            if step >= len(script):
                continue
            records[i].on_token(script[step])
            if step == len(script) - 1:
                records[i].on_end(EndReason.LENGTH)
            output = take_output(records[i])
            assert isinstance(output, Chunk | Finished)
            texts[i] += output.text
    assert texts.pop(SequenceId(2)) == bytes.fromhex("80BF80E441F080").decode("utf-8", "replace")
    assert len(set(texts.values())) == 1
    assert all(r.closed for r in records.values())


def test_dt_08_merged_deltas_keep_the_spaces_between_them(tokenizer: Tokenizer) -> None:
    words = (" the quick brown fox jumps over the lazy dog" * 23)[: 200 * 5]
    ids = tokenizer.encode("x" + words, add_special_tokens=False)
    texts = {"".join(deltas(tokenizer, ids, interval)) for interval in (1, 7, 8)}
    texts.add("".join(deltas(tokenizer, ids, stream=False)))
    prefix = " " if tokenizer.strips_first_space else ""  # the dummy space of SentencePiece continues the prompt
    assert texts == {f"{prefix}x{words}"}
