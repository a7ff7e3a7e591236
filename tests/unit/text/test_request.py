"""A client's request becomes an accepted one, or a refusal that names the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakes.text_requests import validate_request
from fakes.tokenizers import byte_level_folder, ids_of_bytes
from minisgl_backend.errors import InvalidRequest, UnsupportedFeature
from minisgl_backend.messages.client import Request
from minisgl_backend.messages.engine import Sequence
from minisgl_backend.messages.ids import RequestId, SequenceId
from minisgl_backend.messages.tokens import pack_tokens, unpack_tokens
from minisgl_backend.text.limits import RequestLimits
from minisgl_backend.text.request import Accepted, check_request, tokenise
from minisgl_backend.text.tokenizer import Tokenizer

LIMITS = RequestLimits(context_tokens=64, pool_tokens=1000)
PRIORITIES = RequestLimits(context_tokens=64, pool_tokens=1000, priorities=True)


def request(text: bytes | str = "hi", parameters: bytes = b"", **fields: Any) -> Request:
    raw = text.encode() if isinstance(text, str) else text
    values: dict[str, Any] = {"stream": False, "exclude_input_in_output": None, **fields}
    return Request(id=RequestId(1), text_input=raw, parameters=parameters, **values)


def accepted(tokenizer: Tokenizer, *args: Any, limits: RequestLimits = LIMITS, **fields: Any) -> Accepted:
    return validate_request(request(*args, **fields), tokenizer, limits, draw_seed=lambda: 77)


def refusal(tokenizer: Tokenizer, *args: Any, limits: RequestLimits = LIMITS, **fields: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        accepted(tokenizer, *args, limits=limits, **fields)
    return str(caught.value)


def test_an_accepted_request_holds_all_that_the_scheduler_needs(byte_level: Tokenizer) -> None:
    got = accepted(byte_level, "the quick", b'{"max_tokens": 5, "temperature": 0.5, "top_k": 3}')
    assert list(unpack_tokens(got.prompt_ids)) == byte_level.encode("the quick")
    assert (got.prompt_text, got.max_new_tokens, got.stop_token_ids) == ("the quick", 5, (2,))
    assert (got.sampling.temperature, got.sampling.top_k, got.sampling.seed) == (0.5, 3, 77)
    assert got.sequence(SequenceId(4), 0.0) == Sequence(SequenceId(4), got.prompt_ids, got.sampling, 5, (2,))


def test_a_seed_is_drawn_only_when_none_is_given(byte_level: Tokenizer) -> None:
    def never() -> int:
        raise AssertionError("drawn")

    checked = check_request(request(parameters=b'{"seed": 0}'), byte_level, LIMITS)
    assert tokenise(checked, byte_level, LIMITS, never).sampling.seed == 0


def test_ignore_eos_leaves_no_stop_tokens(byte_level: Tokenizer) -> None:
    assert accepted(byte_level, "hi", b'{"ignore_eos": true}').stop_token_ids == ()


@pytest.mark.parametrize(
    ("stream", "exclude", "echo"),
    [(False, None, True), (False, False, True), (False, True, False), (True, None, False), (True, True, False)],
)
def test_the_prompt_stands_in_front_only_without_streaming(
    byte_level: Tokenizer, stream: bool, exclude: bool | None, echo: bool
) -> None:
    got = accepted(byte_level, stream=stream, exclude_input_in_output=exclude)
    assert (got.stream, got.prompt_text) == (stream, "hi" if echo else "")


def test_streaming_with_the_prompt_in_front_is_refused(byte_level: Tokenizer) -> None:
    assert refusal(byte_level, stream=True, exclude_input_in_output=False).startswith("exclude_input_in_output: ")


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "text_input: must not be empty"),
        (b"ab\xff", "text_input: is not valid UTF-8: invalid start byte at byte 2"),
        (b"\xff\xfe", "text_input: is not valid UTF-8: invalid start byte at byte 0"),
        (b"\xed\xa0\x80", "text_input: is not valid UTF-8: invalid continuation byte at byte 0"),
        (b"abc\xf0\x9f", "text_input: is not valid UTF-8: unexpected end of data at byte 3"),
    ],
)
def test_a_prompt_that_is_not_text_is_refused(byte_level: Tokenizer, raw: bytes, says: str) -> None:
    assert refusal(byte_level, raw) == says


def test_zero_bytes_are_text(tokenizer: Tokenizer) -> None:
    got = accepted(tokenizer, b"a\x00b\x00")
    assert ids_of_bytes(tokenizer, b"\x00")[0] in unpack_tokens(got.prompt_ids)


def test_bad_parameters_are_refused_before_the_prompt_is_looked_at(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"^stop: "):
        check_request(request(b"\xff", b'{"stop": 5}'), byte_level, LIMITS)


def test_the_smaller_of_context_and_pool_is_named(byte_level: Tokenizer) -> None:
    limits = RequestLimits(context_tokens=64, pool_tokens=32)
    assert accepted(byte_level, "Q" * 31, b'{"max_tokens": 9}', limits=limits).max_new_tokens == 1
    assert refusal(byte_level, "Q" * 32, limits=limits) == (
        "text_input: the prompt is too long: 32 tokens; the KV pool of 32 tokens takes prompts of at most 31"
    )


def test_a_prompt_that_gives_no_token_is_refused(tmp_path: Path) -> None:
    from tokenizers import normalizers

    from fakes.tokenizers import byte_level, write_folder

    rust = byte_level()
    rust.normalizer = normalizers.Strip()
    assert "nothing that the model's tokenizer knows" in refusal(Tokenizer.load(write_folder(tmp_path, rust)), "  ")


def test_a_token_beyond_the_models_vocabulary_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_level_folder(tmp_path, config={"vocab_size": 300}))
    assert accepted(tokenizer, "hi").num_input_tokens == 2
    assert "which the model does not have (it has 300)" in refusal(tokenizer, "Say: the quick brown fox")


def test_an_exception_of_the_tokenizer_becomes_a_refusal(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import decoders, models

    from fakes.tokenizers import write_folder

    rust = RustTokenizer(models.WordLevel({"a": 0}, unk_token="<unk>"))
    rust.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer.load(write_folder(tmp_path, rust))
    assert list(unpack_tokens(accepted(tokenizer, "a").prompt_ids)) == [0]
    assert refusal(tokenizer, "é").startswith("text_input: can not be tokenised: ")


def test_packed_ids_are_little_endian_int32(byte_level: Tokenizer) -> None:
    assert accepted(byte_level, "hi").prompt_ids == pack_tokens(byte_level.encode("hi"))


# ── ids that end ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_stop_token_ids_join_the_models_ends_and_stay_with_ignore_eos(byte_level: Tokenizer) -> None:
    assert accepted(byte_level, "hi", b'{"stop_token_ids": [9, 2, 7, 9]}').stop_token_ids == (2, 7, 9)
    assert accepted(byte_level, "hi", b'{"stop_token_ids": "[9]", "ignore_eos": true}').stop_token_ids == (9,)


def test_a_stop_token_beyond_the_vocabulary_is_refused_with_its_place(byte_level: Tokenizer) -> None:
    last = byte_level.vocab_size - 1
    assert accepted(byte_level, "hi", b'{"stop_token_ids": [%d]}' % last).stop_token_ids == (2, last)
    assert refusal(byte_level, "hi", b'{"stop_token_ids": [3, %d]}' % (last + 1)) == (
        f"stop_token_ids: must be from 0 to {last}, got {last + 1} at position 1"
    )


# ── priority and deadline ────────────────────────────────────────────────────────────────────────────────────────


def test_a_priority_is_refused_where_it_has_no_effect(byte_level: Tokenizer) -> None:
    with pytest.raises(UnsupportedFeature, match=r"^priority: this server"):
        accepted(byte_level, "hi", b'{"priority": 1}')
    assert accepted(byte_level, "hi", b'{"priority": 0}').priority == 0


def test_a_cache_salt_reaches_the_scheduler_and_is_bounded(byte_level: Tokenizer) -> None:
    assert accepted(byte_level, "hi").sequence(SequenceId(1), 0.0).cache_salt == b""
    assert (
        accepted(byte_level, "hi", b'{"cache_salt": "tenant 7"}').sequence(SequenceId(1), 0.0).cache_salt == b"tenant 7"
    )
    assert refusal(byte_level, "hi", b'{"cache_salt": "%s"}' % (b"x" * 257)).startswith(
        "cache_salt: must hold at most 256"
    )
    assert refusal(byte_level, "hi", b'{"cache_salt": 5}').startswith("cache_salt: must be a string")


def test_a_priority_reaches_the_scheduler(byte_level: Tokenizer) -> None:
    assert accepted(byte_level, "hi", limits=PRIORITIES).sequence(SequenceId(1), 0.0).priority == 0
    got = accepted(byte_level, "hi", b'{"priority": "-7"}', limits=PRIORITIES)
    assert got.sequence(SequenceId(1), 0.0).priority == -7


def test_a_deadline_counts_from_the_arrival_and_both_names_of_it_must_agree(byte_level: Tokenizer) -> None:
    assert accepted(byte_level, "hi", b'{"deadline_ms": 0}').sequence(SequenceId(1), 100.0).deadline_s is None
    assert accepted(byte_level, "hi", timeout_us=1_500_000).sequence(SequenceId(1), 100.0).deadline_s == 101.5
    assert accepted(byte_level, "hi", b'{"deadline_ms": "250"}').sequence(SequenceId(1), 100.0).deadline_s == 100.25
    assert accepted(byte_level, "hi", b'{"deadline_ms": 1500}', timeout_us=1_500_000).timeout_s == 1.5
    assert refusal(byte_level, "hi", b'{"deadline_ms": 2}', timeout_us=2001).startswith("deadline_ms: is another time")
