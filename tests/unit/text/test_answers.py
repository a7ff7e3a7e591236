"""The answers of a record: stop strings, several answers, logprobs, and what of the prompt is told."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fakes.text_requests import feed, take_output, validate_request
from fakes.tokenizers import byte_level_folder, ids_of_bytes
from minisgl_backend.errors import InvalidRequest, Status
from minisgl_backend.messages import engine
from minisgl_backend.messages.client import Chunk, Failed, Finished, FinishReason, PromptLogprobs, Request, Started
from minisgl_backend.messages.engine import EndReason, Samples
from minisgl_backend.messages.ids import RequestId, SequenceId
from minisgl_backend.messages.plan import Logprobs
from minisgl_backend.messages.tokens import count_tokens, pack_tokens, unpack_tokens
from minisgl_backend.scheduler.samples import sequences_of
from minisgl_backend.text.limits import RequestLimits
from minisgl_backend.text.record import Record
from minisgl_backend.text.request import Accepted, answer_form, check_request
from minisgl_backend.text.tokenizer import Tokenizer

LIMITS = RequestLimits(context_tokens=4096, pool_tokens=4096)
ID = RequestId(9)


def accepted(tokenizer: Tokenizer, stream: bool = True, exclude: bool | None = None, **values: Any) -> Accepted:
    values = {"max_tokens": 500, **values}
    request = Request(ID, b"QQQQ", json.dumps(values).encode(), stream, exclude)
    return validate_request(request, tokenizer, LIMITS, lambda: 7)


def record(tokenizer: Tokenizer, stream: bool = True, exclude: bool | None = None, **values: Any) -> Record:
    if not stream and exclude is None and "echo" not in values:
        exclude = True
    return Record(ID, accepted(tokenizer, stream, exclude, **values), tokenizer, 0.0)


def run(r: Record, ids: Iterable[int], end: EndReason = EndReason.LENGTH) -> tuple[list[str], Finished, list[int]]:
    """Token by token, an output taken after each; on to the end even when it has stopped: tokens come late."""
    texts, tokens, last = [], array("i"), None
    for token in ids:
        r.on_token(token)
        output = take_output(r)
        if isinstance(output, Chunk | Finished):
            texts.append(output.text)
            tokens.extend(unpack_tokens(output.tokens))
            last = output
    if not isinstance(last, Finished):
        r.on_end(end)
        last = take_output(r)
        assert isinstance(last, Finished)
        texts.append(last.text)
        tokens.extend(unpack_tokens(last.tokens))
    assert r.closed and r.take_outputs() == []
    assert last.num_output_tokens == len(tokens)
    return texts, last, list(tokens)


# ── stop strings ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_cuts_the_text_and_its_last_token_is_the_answers_last(
    byte_level: Tokenizer, stream: bool, include: bool
) -> None:
    r = record(byte_level, stream, stop="END", include_stop_str_in_output=include)
    ids = ids_of_bytes(byte_level, b"one END two")
    texts, last, tokens = run(r, ids)
    assert "".join(texts) == ("one END" if include else "one ")
    assert tokens == ids[:7] and last.reason is FinishReason.STOP


def test_only_what_may_become_a_stop_string_waits(byte_level: Tokenizer) -> None:
    r = record(byte_level, stop=["red green", "eel"])
    texts, last, _ = run(r, ids_of_bytes(byte_level, b"a red gra"))
    assert texts == ["a", " ", "", "", "", "", "", "", "red gra", ""]
    assert last.reason is FinishReason.LENGTH


def test_what_is_held_is_told_at_the_end(byte_level: Tokenizer) -> None:
    r = record(byte_level, stop="END")
    assert "".join(run(r, ids_of_bytes(byte_level, b"one EN"), EndReason.STOP)[0]) == "one EN"


def test_a_stop_string_may_end_within_the_token_that_completes_its_last_character(byte_level: Tokenizer) -> None:
    table = [*byte_level.shown_bytes]
    one, two, three = 300, 301, 302
    table[one], table[two], table[three] = b"a\xf0\x9f", b"\x98", b"\x80 rest \xc3"
    other = _with_table(byte_level, table)
    r = record(other, stop="😀")
    texts, last, tokens = run(r, [one, two, three, one])
    assert ("".join(texts), tokens, last.reason) == ("a", [one, two, three], FinishReason.STOP)
    r = record(other, stop="😀", include_stop_str_in_output=True)
    assert "".join(run(r, [one, two, three])[0]) == "a😀", "nothing of the text behind it, nor half a character"


def _with_table(tokenizer: Tokenizer, table: list[bytes]) -> Tokenizer:
    import copy

    other = copy.copy(tokenizer)
    other.shown_bytes = table
    return other


def test_before_min_tokens_no_stop_string_ends(byte_level: Tokenizer) -> None:
    for min_tokens, expected in ((0, "a"), (1, "a"), (2, "axb"), (3, "axb"), (4, "axbxc"), (6, "axbxc")):
        r = record(byte_level, stop="x", min_tokens=min_tokens)
        text = "".join(run(r, ids_of_bytes(byte_level, b"axbxc"))[0])
        assert text == expected, min_tokens


def test_a_stop_string_tells_the_scheduler_once_and_late_tokens_are_ignored(byte_level: Tokenizer) -> None:
    r = record(byte_level, stop="x")
    feed(r, ids_of_bytes(byte_level, b"ab"))
    assert r.take_aborts() == []
    feed(r, ids_of_bytes(byte_level, b"xyz"))
    assert (r.take_aborts(), r.take_aborts()) == ([0], [])
    r.on_end(EndReason.ABORT)
    end = take_output(r)
    assert isinstance(end, Finished) and (end.text, end.num_output_tokens) == ("ab", 3)


def test_a_stop_string_wins_over_an_end_in_the_same_step_and_then_nothing_is_left_to_abort(
    byte_level: Tokenizer,
) -> None:
    r = record(byte_level, stop="x")
    feed(r, ids_of_bytes(byte_level, b"abx"))
    r.on_end(EndReason.LENGTH)
    assert r.take_aborts() == []
    end = take_output(r)
    assert isinstance(end, Finished) and end.reason is FinishReason.STOP


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_shown_only_when_the_stop_is_asked_for(byte_level: Tokenizer, include: bool) -> None:
    (q,) = ids_of_bytes(byte_level, b"Q")
    for stop in ([], ["END"]):
        r = record(byte_level, stop_token_ids=[q], stop=stop, include_stop_str_in_output=include)
        texts, _, tokens = run(r, [*ids_of_bytes(byte_level, b"hi"), q], EndReason.STOP)
        assert ("".join(texts), len(tokens)) == ("hiQ" if include else "hi", 3)


@pytest.mark.parametrize("stop", [[], ["END"]])
def test_special_tokens_are_shown_by_choice(byte_level: Tokenizer, stop: list[str]) -> None:
    ids = [*ids_of_bytes(byte_level, b"a"), 1, *ids_of_bytes(byte_level, b"b"), 2]
    for skip, expected in ((True, "ab"), (False, "a<|im_start|>b")):
        r = record(byte_level, skip_special_tokens=skip, stop=stop)
        assert "".join(run(r, ids, EndReason.STOP)[0]) == expected, "the end token is never shown"
    r = record(byte_level, skip_special_tokens=False, stop="start|>")
    assert "".join(run(r, ids)[0]) == "a<|im_"


# ── the prompt: echo, truncation, ids ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [True, False])
def test_echo_puts_the_prompt_in_front_also_of_a_stream(byte_level: Tokenizer, stream: bool) -> None:
    texts, _, _ = run(record(byte_level, stream, echo=True, stop="x"), ids_of_bytes(byte_level, b"abx"))
    assert "".join(texts) == "QQQQab"
    r = record(byte_level, stream, echo=False)
    assert "".join(run(r, ids_of_bytes(byte_level, b"ab"))[0]) == "ab"


@pytest.mark.parametrize(("exclude", "echo"), [(True, True), (False, False)])
def test_echo_must_agree_with_the_dialects_own_option(byte_level: Tokenizer, exclude: bool, echo: bool) -> None:
    with pytest.raises(InvalidRequest, match=r"^echo: says one thing and exclude_input_in_output another"):
        accepted(byte_level, False, exclude, echo=echo)


def test_only_a_text_is_echoed(byte_level: Tokenizer) -> None:
    request = Request(ID, None, b'{"echo": true}', True, None, input_ids=pack_tokens([5]))
    with pytest.raises(InvalidRequest, match=r"^echo: must not be true with input_ids"):
        validate_request(request, byte_level, LIMITS, lambda: 0)


@pytest.mark.parametrize("kind", ["text_input", "input_ids"])
def test_a_prompt_is_cut_to_its_last_tokens(byte_level: Tokenizer, kind: str) -> None:
    limits = RequestLimits(context_tokens=5, pool_tokens=100)
    ids = ids_of_bytes(byte_level, b"ABCDEFGH")

    def kept(number: int) -> list[int]:
        text = b"ABCDEFGH" if kind == "text_input" else None
        raw = b'{"truncate_prompt_tokens": %d}' % number
        request = Request(ID, text, raw, True, None, input_ids=None if text else pack_tokens(ids))
        return list(unpack_tokens(validate_request(request, byte_level, limits, lambda: 0).prompt_ids))

    assert (kept(2), kept(4), kept(-1)) == (ids[-2:], ids[-4:], ids[-4:])
    with pytest.raises(InvalidRequest, match=r"^truncate_prompt_tokens: must be at most 4, the longest prompt here"):
        kept(5)


@pytest.mark.parametrize(
    ("tokens", "echoed"), [(None, "a日<|im_end|>b"), (9, "a日<|im_end|>b"), (3, "\ufffd<|im_end|>b")]
)
def test_a_prompt_that_was_cut_is_echoed_as_the_model_saw_it(
    byte_level: Tokenizer, tokens: int | None, echoed: str
) -> None:
    """Three tokens are the last byte of a character, a special token that the client wrote, and a letter."""
    raw = json.dumps({"echo": True, "truncate_prompt_tokens": tokens}).encode()
    request = Request(ID, "a日<|im_end|>b".encode(), raw, True, None)
    got = validate_request(request, byte_level, LIMITS, lambda: 0)
    assert (got.prompt_text, got.num_input_tokens) == (echoed, 6 if tokens != 3 else 3)


def test_token_ids_of_the_prompt_come_with_the_start(byte_level: Tokenizer) -> None:
    for asked in (True, False):
        r = record(byte_level, return_token_ids=asked)
        r.on_started(engine.Started(SequenceId(1), 0, 0.0), 0.0)
        (told,) = r.take_outputs()
        assert isinstance(told, Started)
        assert list(unpack_tokens(told.prompt_ids)) == (ids_of_bytes(byte_level, b"QQQQ") if asked else [])


def test_allowed_tokens_and_a_form_might_have_no_token_in_common_and_are_refused(byte_level: Tokenizer) -> None:
    raw = json.dumps({"guided_choice": ["a"], "allowed_token_ids": [65]}).encode()
    checked = check_request(Request(ID, b"Q", raw, True, None), byte_level, LIMITS)
    with pytest.raises(InvalidRequest, match=r"^allowed_token_ids: can not be given together with guided_choice"):
        answer_form(checked, byte_level)


def test_of_stop_tokens_those_without_a_text_end_a_whole_form_and_others_are_a_part_of_it(
    byte_level: Tokenizer, tmp_path: Path
) -> None:
    (x,) = ids_of_bytes(byte_level, b"x")
    silent, end = 0, 2
    assert byte_level.eos_token_ids == (end,) and not byte_level.shown_bytes[silent]

    def ends(tokenizer: Tokenizer, stops: list[int]) -> tuple[int, ...]:
        raw = json.dumps({"guided_choice": ["x"], "stop_token_ids": stops}).encode()
        form = answer_form(check_request(Request(ID, b"Q", raw, True, None), tokenizer, LIMITS), tokenizer)
        assert form is not None
        return form[1]

    assert ends(byte_level, [x]) == (end,)
    assert ends(byte_level, [x, silent]) == (silent, end)
    endless = Tokenizer.load(byte_level_folder(tmp_path, tokenizer_config={}))
    assert endless.eos_token_ids == () and ends(endless, [x]) == (x,)


# ── several answers ──────────────────────────────────────────────────────────────────────────────────────────────


def test_each_answer_is_a_sequence_of_its_own_with_its_own_index(byte_level: Tokenizer) -> None:
    got = accepted(byte_level, n=3, seed=4)
    samples = got.sequences(SequenceId(10), 0.0)
    assert isinstance(samples, Samples)
    sequences = sequences_of(samples)
    assert [one.id for one in sequences] == [10, 11, 12]
    assert [one.sampling.sample_index for one in sequences] == [0, 1, 2]
    assert {(one.prompt, one.sampling.seed) for one in sequences} == {(got.prompt_ids, 4)}


def test_answers_of_a_stream_come_by_index_and_the_last_to_end_ends_the_request(byte_level: Tokenizer) -> None:
    r = record(byte_level, n=3)
    a, b, c = ids_of_bytes(byte_level, b"abc")
    r.on_token(a, 0)
    r.on_token(b, 2)
    assert r.take_outputs() == [Chunk(ID, "a", pack_tokens([a]), 0), Chunk(ID, "b", pack_tokens([b]), 2)]
    r.on_end(EndReason.STOP, 2)
    r.on_token(c, 1)
    assert r.take_outputs() == [
        Chunk(ID, "c", pack_tokens([c]), 1),
        Chunk(ID, "", b"", 2, FinishReason.STOP),
    ]
    r.on_end(EndReason.LENGTH, 1)
    r.on_end(EndReason.STOP, 0)
    first, last = r.take_outputs()
    assert first == Chunk(ID, "", b"", 0, FinishReason.STOP)
    assert last == Finished(ID, "", b"", FinishReason.LENGTH, 4, 3, 1)
    assert r.closed


def test_answers_that_do_not_stream_come_whole_at_the_end(byte_level: Tokenizer) -> None:
    r = record(byte_level, stream=False, n=2, stop="x", echo=True)
    for index, text in enumerate((b"abx", b"cd")):
        for token in ids_of_bytes(byte_level, text):
            r.on_token(token, index)
    assert r.take_outputs() == [] and r.take_aborts() == [0], "an answer that stopped is let go, the other goes on"
    r.on_end(EndReason.LENGTH, 1)
    first, last = r.take_outputs()
    assert isinstance(first, Chunk) and (first.text, first.reason) == ("QQQQab", FinishReason.STOP)
    assert isinstance(last, Finished) and (last.text, last.index) == ("QQQQcd", 1)
    assert last.num_output_tokens == 5


@pytest.mark.parametrize("reason", [EndReason.FAILED, EndReason.DEADLINE, EndReason.ABORT])
def test_what_goes_wrong_with_one_answer_ends_all(byte_level: Tokenizer, reason: EndReason) -> None:
    r = record(byte_level, n=3)
    r.on_end(EndReason.STOP, 1)
    r.on_end(reason, 2)
    assert r.take_aborts() == [0], "the only one that the scheduler still has"
    end = r.take_outputs()[-1]
    assert isinstance(end, Failed) and end.status is not Status.INVALID_ARGUMENT
    r.on_end(EndReason.ABORT, 0)
    assert r.closed and r.take_outputs() == []


# ── logprobs ─────────────────────────────────────────────────────────────────────────────────────────────────────


def told(position: int, rows: Sequence[tuple[Sequence[int], Sequence[float], int]]) -> Logprobs:
    return Logprobs(
        position,
        pack_tokens(token for ids, _, _ in rows for token in ids),
        array("f", [value for _, values, _ in rows for value in values]).tobytes(),
        pack_tokens(rank for _, _, rank in rows),
    )


def test_logprobs_agree_with_the_tokens_of_each_piece(byte_level: Tokenizer) -> None:
    r = record(byte_level, logprobs=2, stop="xx")
    a, x = ids_of_bytes(byte_level, b"ax")
    r.on_logprobs(told(4, [((a, x, a), (-1.5, -0.5, -1.5), 2)]))
    r.on_token(a)
    chunk = take_output(r)
    assert isinstance(chunk, Chunk) and (chunk.text, chunk.logprob) == ("a", -1.5)
    assert json.loads(chunk.logprobs) == [
        {
            str(a): {"logprob": -1.5, "rank": 2, "decoded_token": "a"},
            str(x): {"logprob": -0.5, "rank": 1, "decoded_token": "x"},
        }
    ]
    r.on_logprobs(told(5, [((x, x, a), (-0.25, -0.25, -2.0), 1), ((x, x, a), (-0.5, -0.5, -2.0), 1)]))
    feed(r, [x, x])
    r.on_logprobs(told(7, [((a, x, a), (-9.0, -0.5, -1.5), 2)]))
    r.on_token(a)  # late: the answer has stopped
    end = take_output(r)
    assert isinstance(end, Finished) and (end.text, end.logprob, count_tokens(end.tokens)) == ("", -0.75, 2)
    assert [list(entry) for entry in json.loads(end.logprobs)] == [[str(x), str(a)]] * 2


def test_a_piece_of_no_tokens_has_an_empty_list_and_who_did_not_ask_has_none(byte_level: Tokenizer) -> None:
    r = record(byte_level, logprobs=0)
    r.on_end(EndReason.LENGTH)
    end = take_output(r)
    assert isinstance(end, Finished) and end.logprobs == b"[]"
    r = record(byte_level)
    r.on_end(EndReason.LENGTH)
    end = take_output(r)
    assert isinstance(end, Finished) and end.logprobs == b""


def test_a_token_that_is_no_whole_character_shows_what_is_missing_and_its_bytes(byte_level: Tokenizer) -> None:
    r = record(byte_level, logprobs=0)
    (half,) = ids_of_bytes(byte_level, b"\xf0")
    r.on_logprobs(told(4, [((half,), (float("-inf"),), 384)]))
    r.on_token(half)
    chunk = take_output(r)
    assert isinstance(chunk, Chunk)
    (entry,) = json.loads(chunk.logprobs)
    assert entry == {str(half): {"logprob": -9999.0, "rank": 384, "decoded_token": "\ufffd", "bytes": [0xF0]}}


def test_prompt_logprobs_are_told_once_with_a_null_for_the_first_token(byte_level: Tokenizer) -> None:
    r = record(byte_level, prompt_logprobs=0)
    q = ids_of_bytes(byte_level, b"Q")[0]
    rows = [((q,), (-0.5 * number,), number) for number in (1, 2, 3)]
    r.on_prompt_logprobs(told(1, rows[:1]))
    r.on_prompt_logprobs(told(2, rows[1:]))
    r.write_some()
    assert r.take_outputs() == []
    r.on_token(q)
    first, chunk = r.take_outputs()
    assert isinstance(first, PromptLogprobs) and isinstance(chunk, Chunk) and chunk.logprobs == b""
    expected = [{str(q): {"logprob": -0.5 * n, "rank": n, "decoded_token": "Q"}} for n in (1, 2, 3)]
    assert json.loads(first.logprobs) == [None, *expected]
    r.on_prompt_logprobs(told(1, rows))  # after a retraction
    r.on_token(q)
    assert [type(output) for output in r.take_outputs()] == [Chunk]


def test_a_prompt_of_one_token_has_only_the_null(byte_level: Tokenizer) -> None:
    request = Request(ID, None, b'{"prompt_logprobs": 3}', True, None, input_ids=pack_tokens([5]))
    r = Record(ID, validate_request(request, byte_level, LIMITS, lambda: 0), byte_level, 0.0)
    r.on_token(5)
    assert r.take_outputs()[0] == PromptLogprobs(ID, b"[null]")
