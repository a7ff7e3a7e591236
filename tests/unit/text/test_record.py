"""The record of one request: what goes in, what comes out, and that it ends once."""

from __future__ import annotations

import pytest

from fakes.text_requests import feed, take_output, take_started, validate_request
from fakes.tokenizers import ids_of_bytes
from minisgl_backend.errors import EngineUnavailable, RequestCancelled, Status, error_of
from minisgl_backend.messages import engine
from minisgl_backend.messages.client import Chunk, Failed, Finished, FinishReason, Request, Started
from minisgl_backend.messages.engine import EndReason
from minisgl_backend.messages.ids import RequestId, SequenceId
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.text.limits import RequestLimits
from minisgl_backend.text.record import Record
from minisgl_backend.text.tokenizer import Tokenizer

LIMITS = RequestLimits(context_tokens=4096, pool_tokens=4096)
ID = RequestId(9)


def record(
    tokenizer: Tokenizer,
    stream: bool,
    parameters: bytes = b"",
    exclude: bool | None = None,
    arrived_s: float = 0.0,
) -> Record:
    request = Request(ID, b"QQQQ", parameters, stream, exclude)
    return Record(ID, validate_request(request, tokenizer, LIMITS, lambda: 0), tokenizer, arrived_s)


def test_a_stream_gives_a_chunk_per_take_and_the_rest_with_the_end(byte_level: Tokenizer) -> None:
    r = record(byte_level, stream=True)
    a, f0, f1 = ids_of_bytes(byte_level, "aé".encode())
    assert take_output(r) is None
    r.on_token(a)
    assert take_output(r) == Chunk(ID, "a", pack_tokens([a]))
    assert take_output(r) is None
    r.on_token(f0)
    assert take_output(r) == Chunk(ID, "", pack_tokens([f0]))
    r.on_token(f1)
    r.on_end(EndReason.LENGTH)
    assert take_output(r) == Finished(ID, "é", pack_tokens([f1]), FinishReason.LENGTH, 4, 3)
    assert r.closed and take_output(r) is None


def test_tokens_that_pile_up_leave_as_one_chunk(byte_level: Tokenizer) -> None:
    r = record(byte_level, stream=True)
    ids = ids_of_bytes(byte_level, b"one two")
    feed(r, ids[:3])
    feed(r, ids[3:])
    assert take_output(r) == Chunk(ID, "one two", pack_tokens(ids))


@pytest.mark.parametrize(("exclude", "prefix"), [(None, "QQQQ"), (False, "QQQQ"), (True, "")])
def test_without_streaming_everything_comes_once_behind_the_prompt(
    byte_level: Tokenizer, exclude: bool | None, prefix: str
) -> None:
    r = record(byte_level, stream=False, exclude=exclude)
    ids = ids_of_bytes(byte_level, b" hi")
    for token in ids:
        r.on_token(token)
        assert take_output(r) is None
    r.on_end(EndReason.LENGTH)
    assert take_output(r) == Finished(ID, f"{prefix} hi", pack_tokens(ids), FinishReason.LENGTH, 4, 3)


def test_a_stop_token_counts_and_is_not_shown(byte_level: Tokenizer) -> None:
    r = record(byte_level, stream=True)
    ids = [*ids_of_bytes(byte_level, b"hi"), 2]
    feed(r, ids)
    r.on_end(EndReason.STOP)
    assert take_output(r) == Finished(ID, "hi", pack_tokens(ids), FinishReason.STOP, 4, 3)


def test_a_stop_token_with_a_text_of_its_own_is_not_shown_either(byte_level: Tokenizer) -> None:
    visible = byte_level.encode("the")[0]
    for taken_early in (False, True):
        r = record(byte_level, True, b'{"stop_token_ids": [%d]}' % visible)
        r.on_token(visible)
        if taken_early:
            assert take_output(r) == Chunk(ID, "", pack_tokens([visible]))
        r.on_end(EndReason.STOP)
        end = take_output(r)
        assert isinstance(end, Finished) and (end.text, end.num_output_tokens) == ("", 1)


def test_with_ignore_eos_the_end_token_is_counted_and_the_answer_goes_on(byte_level: Tokenizer) -> None:
    r = record(byte_level, stream=False, parameters=b'{"ignore_eos": true}', exclude=True)
    feed(r, [*ids_of_bytes(byte_level, b"a"), 2, *ids_of_bytes(byte_level, b"b")])
    r.on_end(EndReason.LENGTH)
    end = take_output(r)
    assert isinstance(end, Finished) and (end.text, end.num_output_tokens) == ("ab", 3)


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (EndReason.FAILED, Status.INTERNAL),
        (EndReason.ABORT, Status.CANCELLED),
        (EndReason.DEADLINE, Status.UNAVAILABLE),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_a_sequence_that_failed_or_was_let_go_ends_in_an_error(
    byte_level: Tokenizer, reason: EndReason, status: Status, stream: bool
) -> None:
    r = record(byte_level, stream=stream)
    feed(r, ids_of_bytes(byte_level, b"hi"))
    r.on_end(reason)
    end = take_output(r)
    assert isinstance(end, Failed) and end.status is status and end.message
    assert take_output(r) is None


def test_the_first_end_wins_and_only_one_is_told(byte_level: Tokenizer) -> None:
    r = record(byte_level, stream=True)
    r.fail(EngineUnavailable("the engine is starting again"))
    assert r.ended and not r.closed
    r.on_end(EndReason.STOP)
    r.fail(RequestCancelled("late"))
    r.on_token(5)
    assert take_output(r) == Failed(ID, Status.UNAVAILABLE, "the engine is starting again")
    r.on_end(EndReason.LENGTH)
    assert r.closed and take_output(r) is None


def test_a_finished_answer_can_not_fail_any_more(byte_level: Tokenizer) -> None:
    r = record(byte_level, stream=True)
    r.on_end(EndReason.LENGTH)
    r.fail(EngineUnavailable("too late"))
    r.on_token(5)
    feed(r, [5, 5])
    assert take_output(r) == Finished(ID, "", b"", FinishReason.LENGTH, 4, 0)


def begun(cached_tokens: int = 3, planned_s: float = 100.5) -> engine.Started:
    return engine.Started(SequenceId(1), cached_tokens, planned_s)


@pytest.mark.parametrize("stream", [True, False])
def test_the_first_token_tells_once_what_was_cached_and_how_long_it_took(byte_level: Tokenizer, stream: bool) -> None:
    r = record(byte_level, stream, arrived_s=100.0)
    assert take_started(r) is None
    r.on_started(begun(), now_s=102.0)
    assert take_started(r) == Started(ID, num_input_tokens=4, num_cached_tokens=3, queue_ms=500.0, ttft_ms=2000.0)
    assert take_started(r) is None


def test_a_first_token_that_is_also_the_last_is_told_before_the_end(byte_level: Tokenizer) -> None:
    r = record(byte_level, stream=False)
    r.on_started(begun(), now_s=101.0)
    r.on_token(5)
    r.on_end(EndReason.LENGTH)
    begun_, end = r.take_outputs()
    assert isinstance(begun_, Started) and isinstance(end, Finished)


def test_after_the_end_nothing_starts(byte_level: Tokenizer) -> None:
    r = record(byte_level, stream=True)
    r.fail(RequestCancelled("gone"))
    r.on_started(begun(), now_s=101.0)
    assert take_started(r) is None


def test_times_are_never_negative(byte_level: Tokenizer) -> None:
    r = record(byte_level, stream=True, arrived_s=200.0)
    r.on_started(begun(planned_s=199.9999), now_s=199.99995)
    told = take_started(r)
    assert told is not None and (told.queue_ms, told.ttft_ms) == (0.0, 0.0)


def test_a_passed_deadline_is_told_as_such(byte_level: Tokenizer) -> None:
    r = record(byte_level, stream=True)
    feed(r, ids_of_bytes(byte_level, b"hi"))
    r.on_end(EndReason.DEADLINE)
    end = take_output(r)
    assert isinstance(end, Failed) and "deadline" in end.message
    assert isinstance(error_of(end.status, end.message), EngineUnavailable)


def test_a_stop_token_of_the_client_ends_and_is_not_shown(byte_level: Tokenizer) -> None:
    (q,) = ids_of_bytes(byte_level, b"Q")
    r = record(byte_level, stream=False, parameters=b'{"stop_token_ids": [%d], "ignore_eos": true}' % q, exclude=True)
    feed(r, [*ids_of_bytes(byte_level, b"hi"), q])
    r.on_end(EndReason.STOP)
    end = take_output(r)
    assert isinstance(end, Finished) and (end.text, end.num_output_tokens) == ("hi", 3)
