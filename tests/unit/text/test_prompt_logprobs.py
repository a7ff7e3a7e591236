"""The JSON of a prompt's logprobs: the same however it is cut, never much at a time, and bounded as a whole."""

from __future__ import annotations

import json
import math
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.text_requests import take_output, validate_request
from fakes.tokenizers import ids_of_bytes
from minisgl_backend.errors import InvalidRequest, RequestCancelled, Status
from minisgl_backend.messages import engine
from minisgl_backend.messages.client import Chunk, Failed, Finished, FinishReason, PromptLogprobs, Request, Started
from minisgl_backend.messages.engine import EndReason
from minisgl_backend.messages.ids import RequestId, SequenceId
from minisgl_backend.messages.plan import Logprobs
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.text import logprobs, prompt_logprobs
from minisgl_backend.text.limits import RequestLimits
from minisgl_backend.text.parameters import MAX_PROMPT_LOGPROBS
from minisgl_backend.text.prompt_logprobs import SLICE_ENTRIES, PromptWriter, refuse_many
from minisgl_backend.text.record import Record
from minisgl_backend.text.tokenizer import Tokenizer

WIDTH = 21
LIMITS = RequestLimits(context_tokens=4096, pool_tokens=4096)


def told(first: int, end: int) -> Logprobs:
    """Of the tokens at these positions: each is the id of its position, and as many others as may be asked for."""
    ids = [(position + place) % 300 for position in range(first, end) for place in range(WIDTH)]
    values = array("f", [-0.5 * place for _ in range(first, end) for place in range(WIDTH)])
    return Logprobs(first, pack_tokens(ids), values.tobytes(), pack_tokens(range(first, end)))


def written(writer: PromptWriter) -> list[dict[str, dict[str, object]] | None]:
    while writer.is_behind:
        writer.write_some()
    assert writer.is_complete
    found: list[dict[str, dict[str, object]] | None] = json.loads(writer.take())
    return found


@given(st.lists(st.integers(1, 60), min_size=1), st.integers(0, 59), st.lists(st.booleans(), min_size=8, max_size=8))
def test_chunks_cut_anywhere_and_told_again_make_the_same_list(
    byte_level: Tokenizer, cuts: list[int], again: int, turns: list[bool]
) -> None:
    whole = PromptWriter(60, byte_level)
    whole.add(told(1, 60))
    writer = PromptWriter(60, byte_level)
    ends = sorted({*cuts, 60})
    for begin in (ends[: again % len(ends)], ends):  # a retraction after some of them
        first = 1
        for number, end in enumerate(begin):
            if first < end:
                writer.add(told(first, end))
            first = max(first, end)
            if turns[number % len(turns)]:
                writer.write_some()
    entries = written(writer)
    assert entries == written(whole)
    assert entries[0] is None and [next(iter(entry or ())) for entry in entries[1:]] == [str(i) for i in range(1, 60)]


def test_a_slice_holds_so_many_entries_and_no_more(byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(row: logprobs.Row, tokenizer: Tokenizer) -> bytes:
        made[-1] += len(row.ids)
        return logprobs.row_json(row, tokenizer)

    monkeypatch.setattr(prompt_logprobs, "row_json", counted)
    writer = PromptWriter(1000, byte_level)
    for first in range(1, 1000, 300):
        writer.add(told(first, min(first + 300, 1000)))
    while writer.is_behind:
        made.append(0)
        writer.write_some()
    assert sum(made) == 999 * WIDTH
    assert max(made) <= SLICE_ENTRIES and min(made[:-1]) > SLICE_ENTRIES - WIDTH


def record(tokenizer: Tokenizer, tokens: int, stream: bool = True) -> Record:
    raw = b'{"prompt_logprobs": %d, "max_tokens": 100}' % (WIDTH - 1)
    ids = pack_tokens(i % 300 for i in range(tokens))
    request = Request(RequestId(1), None, raw, stream, None, input_ids=ids)
    return Record(request.id, validate_request(request, tokenizer, LIMITS, lambda: 0), tokenizer, 0.0)


@pytest.mark.parametrize("stream", [True, False])
def test_pieces_wait_until_the_prompts_logprobs_are_written_and_come_behind_them(
    byte_level: Tokenizer, stream: bool
) -> None:
    r, (a,) = record(byte_level, 200, stream), ids_of_bytes(byte_level, b"a")
    r.on_started(engine.Started(SequenceId(1), 0, 0.0), 0.0)
    r.on_prompt_logprobs(told(1, 200))
    r.on_token(a)
    assert [type(output) for output in r.take_outputs()] == [Started]
    slices = 0
    while r.is_behind:
        r.write_some()
        slices += 1
        if r.is_behind:
            r.on_token(a)
            assert r.take_outputs() == []
    assert slices == math.ceil(199 / (SLICE_ENTRIES // WIDTH))
    r.on_end(EndReason.LENGTH)
    first, last = r.take_outputs()
    assert isinstance(first, PromptLogprobs) and len(json.loads(first.logprobs)) == 200
    assert isinstance(last, Finished) and (last.text, last.reason) == ("a" * slices, FinishReason.LENGTH)


def test_an_error_waits_for_nothing_to_be_written(byte_level: Tokenizer) -> None:
    r = record(byte_level, 200)
    r.on_prompt_logprobs(told(1, 200))
    r.write_some()
    r.fail(RequestCancelled("gone"))
    assert not r.is_behind
    assert take_output(r) == Failed(RequestId(1), Status.CANCELLED, "gone")


def test_an_answers_logprobs_are_written_as_its_tokens_come_and_not_at_its_end(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0

    def counted(row: logprobs.Row, tokenizer: Tokenizer) -> bytes:
        nonlocal made
        made += 1
        return logprobs.row_json(row, tokenizer)

    monkeypatch.setattr("minisgl_backend.text.sample.row_json", counted)
    request = Request(RequestId(1), b"Q", b'{"logprobs": 20, "max_tokens": 100}', False, None)
    r = Record(request.id, validate_request(request, byte_level, LIMITS, lambda: 0), byte_level, 0.0)
    for number in range(1, 30):
        r.on_logprobs(told(number, number + 1))
        r.on_token(5)
        assert r.take_outputs() == [] and made == number
    r.on_end(EndReason.LENGTH)
    end = take_output(r)
    assert isinstance(end, Chunk | Finished) and len(json.loads(end.logprobs)) == made == 29


def test_the_bound_is_that_of_tokens_and_their_best_ones_together() -> None:
    for best, most in ((0, MAX_PROMPT_LOGPROBS), (20, MAX_PROMPT_LOGPROBS // 21)):
        refuse_many(best, most)
        with pytest.raises(InvalidRequest, match=r"^prompt_logprobs: ") as caught:
            refuse_many(best, most + 1)
        says = {
            0: f"are told of prompts of at most {MAX_PROMPT_LOGPROBS} tokens, got {most + 1}",
            20: f"must be at most 19 with a prompt of {most + 1} tokens, got 20",
        }[best]
        assert str(caught.value) == f"prompt_logprobs: {says}"
    refuse_many(None, 1 << 30)


def test_a_request_over_the_bound_is_refused_before_it_runs(byte_level: Tokenizer) -> None:
    tokens = MAX_PROMPT_LOGPROBS // 21 + 1
    limits = RequestLimits(context_tokens=1 << 20, pool_tokens=1 << 20)
    request = Request(RequestId(1), None, b'{"prompt_logprobs": 20}', True, None, input_ids=pack_tokens([5] * tokens))
    with pytest.raises(InvalidRequest, match=rf"^prompt_logprobs: must be at most 19 with a prompt of {tokens} tokens"):
        validate_request(request, byte_level, limits, lambda: 0)
