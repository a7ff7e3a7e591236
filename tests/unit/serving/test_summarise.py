"""The Summariser between a fake bridge and a fake model: order, bounds, failures, cancels."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from fakes.triton_stub import FakeStub, Log, request
from minisgl_backend.errors import ConfigError, EngineUnavailable, RequestError, Status
from minisgl_backend.messages.client import Chunk, Failed, Finished, FinishReason, Output, Request
from minisgl_backend.messages.ids import RequestId
from minisgl_backend.serving import summarise
from minisgl_backend.serving.bridge import Bridge
from minisgl_backend.serving.calls import Said
from minisgl_backend.serving.summarise import Settings, Summariser, prompt_of, read_settings, read_text, start

WAIT_S = 60.0


class FakeModel:
    """The model that is asked. A call waits while its part's first word is held."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.held: set[str] = set()
        self.answers: Callable[[str, str, Mapping[str, Any]], Said] = said_once
        self.calls: list[tuple[str, str, Mapping[str, Any]]] = []  # first word, summary so far, parameters
        self.inside = 0
        self.most_inside = 0

    def __call__(self, prompt: str, sampling: Mapping[str, Any]) -> Said:
        match = re.fullmatch(r"[^\n]*\n\nText:\n(\S+).*\n\nSummary:(.*)", prompt, re.DOTALL)
        assert match is not None
        word, so_far = match.groups()
        with self._changed:
            self.calls.append((word, so_far, sampling))
            self.inside += 1
            self.most_inside = max(self.most_inside, self.inside)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: word not in self.held, WAIT_S)
            self.inside -= 1
        return self.answers(word, so_far, sampling)

    def release(self, *words: str) -> None:
        with self._changed:
            self.held -= set(words)
            self._changed.notify_all()

    def wait_calls(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.calls) >= count, WAIT_S)


def said_once(word: str, so_far: str, sampling: Mapping[str, Any]) -> Said:
    return Said(f" {word}!", FinishReason.STOP, 2)


class Outputs:
    """What the bridge's outbox gets."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.items: list[Output] = []

    def post(self, outputs: Sequence[Output]) -> None:
        with self._changed:
            self.items += outputs
            self._changed.notify_all()

    def wait_end(self, id: int) -> Output:
        with self._changed:
            assert self._changed.wait_for(lambda: self._ends(id), WAIT_S), self.items
        (end,) = self._ends(id)
        assert self.of(id)[-1] is end, "something after the end"
        return end

    def wait(self, count: int) -> list[Output]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.items) >= count, WAIT_S), self.items
            return list(self.items)

    def of(self, id: int) -> list[Output]:
        return [item for item in self.items if item.id == id]

    def text(self, id: int) -> str:
        return "".join(item.text for item in self.of(id) if isinstance(item, Chunk | Finished))

    def _ends(self, id: int) -> list[Output]:
        return [item for item in self.of(id) if isinstance(item, Finished | Failed)]


class Rig:
    def __init__(self, **settings: Any) -> None:
        self.model, self.outputs, self.log = FakeModel(), Outputs(), Log()
        self.summariser = Summariser(self.model, self.outputs.post, Settings(**settings), self.log)
        self.summariser.start()

    def ask(self, id: int, *words: str, **parameters: Any) -> None:
        """A text whose parts begin with these words."""
        text = "".join(f"{word} {'x' * (62 - len(word))}\n\n" for word in words)  # 65 bytes a part
        raw = json.dumps({"part_bytes": 65, **parameters}).encode()
        self.summariser.submit(asked(id, text.encode(), raw))


def asked(id: int, text: bytes | None, parameters: bytes = b"", **fields: Any) -> Request:
    return Request(RequestId(id), text, parameters, True, None, **fields)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(parallel_parts=3)
    yield rig
    rig.model.release(*rig.model.held)
    rig.summariser.close()
    assert rig.log.lines == []


def test_parts_are_summarised_at_once_and_sent_in_their_order(rig: Rig) -> None:
    rig.model.held = {"one"}
    rig.ask(1, "one", "two", "three")
    rig.model.wait_calls(3)
    assert rig.outputs.items == [], "nothing overtakes the first part"
    rig.model.release("one")
    assert isinstance(rig.outputs.wait_end(1), Finished)
    assert rig.outputs.text(1) == "one!\n\ntwo!\n\nthree!"


def test_the_first_part_is_sent_while_a_later_one_is_not_done(rig: Rig) -> None:
    rig.model.held = {"two"}
    rig.ask(1, "one", "two")
    assert rig.outputs.wait(1) == [Chunk(RequestId(1), "one!", b"")]
    rig.model.release("two")
    rig.outputs.wait_end(1)


def test_no_more_parts_than_allowed_are_asked_for_at_once_and_texts_take_turns(rig: Rig) -> None:
    words = [f"w{place}" for place in range(9)]
    rig.model.held = {*words, "short"}
    rig.ask(1, *words)
    rig.ask(2, "short")
    rig.model.wait_calls(3)
    rig.model.release(*words[:2])
    rig.model.wait_calls(5)
    assert "short" in [word for word, _, _ in rig.model.calls], "a long text does not hold up a short one"
    rig.model.release(*words, "short")
    rig.outputs.wait_end(1)
    rig.outputs.wait_end(2)
    assert rig.model.most_inside == 3


def test_a_summary_is_asked_for_in_slices_each_continuing_the_last(rig: Rig) -> None:
    rig.model.answers = lambda word, so_far, sampling: Said(f" {len(so_far)}", FinishReason.LENGTH, 16)
    rig.ask(1, "one", max_tokens=40, top_k=5)
    end = rig.outputs.wait_end(1)
    assert isinstance(end, Finished) and end.reason is FinishReason.LENGTH
    assert [(so_far, sampling["max_tokens"]) for _, so_far, sampling in rig.model.calls] == [
        ("", 16),
        (" 0", 16),
        (" 0 2", 8),
    ]
    assert {(sampling["top_k"], sampling["temperature"]) for _, _, sampling in rig.model.calls} == {(5, 0)}
    assert rig.outputs.text(1) == "0 2 4"


def test_a_failed_part_fails_its_text_once_and_stops_the_others_but_no_other_text(rig: Rig) -> None:
    def answer(word: str, so_far: str, sampling: Mapping[str, Any]) -> Said:
        if word == "bad":
            raise EngineUnavailable("the engine died")
        return Said(" go on", FinishReason.LENGTH, 16)

    rig.model.answers = answer
    rig.model.held = {"one", "bad", "third"}
    rig.ask(1, "one", "bad", "third", "fourth", max_tokens=4096)
    rig.model.wait_calls(3)
    rig.model.release("bad")
    assert rig.outputs.wait_end(1) == Failed(RequestId(1), Status.UNAVAILABLE, "the engine died")
    rig.model.release("one", "third")
    rig.ask(2, "other", max_tokens=16)
    assert isinstance(rig.outputs.wait_end(2), Finished)
    assert sorted(word for word, _, _ in rig.model.calls) == ["bad", "one", "other", "third"]


def test_a_cancel_ends_the_text_at_once_and_its_parts_with_their_slices(rig: Rig) -> None:
    rig.model.answers = lambda word, so_far, sampling: Said(" go on", FinishReason.LENGTH, 16)
    rig.model.held = {"one", "two", "three"}
    rig.ask(1, "one", "two", "three", "four", max_tokens=4096)
    rig.model.wait_calls(3)
    rig.summariser.cancel(RequestId(1))
    rig.summariser.cancel(RequestId(1))
    assert rig.outputs.wait_end(1) == Failed(RequestId(1), Status.CANCELLED, "the request was cancelled")
    rig.model.release("one", "two", "three")
    rig.ask(2, "next", max_tokens=16)
    rig.outputs.wait_end(2)
    assert sorted(word for word, _, _ in rig.model.calls) == ["next", "one", "three", "two"]


def test_an_unexpected_error_is_logged_and_told_without_our_code() -> None:
    rig = Rig(parallel_parts=1)
    rig.model.answers = lambda word, so_far, sampling: Said(**{})
    rig.ask(1, "one")
    end = rig.outputs.wait_end(1)
    assert end == Failed(RequestId(1), Status.INTERNAL, "the text could not be summarised")
    assert "TypeError" in rig.log.lines[0]
    rig.summariser.close()


def test_closing_fails_what_is_open_and_waits_for_the_calls_under_way() -> None:
    rig = Rig(parallel_parts=1)
    rig.model.held = {"one"}
    rig.ask(1, "one", "two")
    rig.model.wait_calls(1)
    closing = threading.Thread(target=rig.summariser.close)
    closing.start()
    assert rig.outputs.wait_end(1) == Failed(RequestId(1), Status.UNAVAILABLE, "the model is being unloaded")
    assert closing.is_alive()
    rig.model.release("one")
    closing.join(WAIT_S)
    assert not closing.is_alive() and len(rig.model.calls) == 1 and rig.log.lines == []


def test_a_call_that_takes_too_long_fails_its_text_and_no_other() -> None:
    rig = Rig(parallel_parts=2, call_s=60)
    rig.model.held = {"one"}
    rig.ask(1, "one")
    rig.model.wait_calls(1)
    rig.summariser.end_late(time.monotonic() + 30)
    rig.ask(2, "two")
    assert isinstance(rig.outputs.wait_end(2), Finished), "nobody was late"
    assert rig.log.lines == []
    rig.summariser.end_late(time.monotonic() + 61)
    end = rig.outputs.wait_end(1)
    assert end == Failed(RequestId(1), Status.UNAVAILABLE, "the model 'minisgl' did not answer within 60 s")
    rig.summariser.end_late(time.monotonic() + 62)
    assert rig.log.lines == [
        "error summarise: the model 'minisgl' did not answer within 60 s: 1 of 2 workers wait for it, 1 text was ended"
    ], "and the log says so once"
    rig.model.release("one")
    rig.summariser.close()


def test_when_every_call_takes_too_long_the_texts_that_wait_fail_too() -> None:
    rig = Rig(parallel_parts=1, call_s=60)
    rig.model.held = {"one"}
    rig.ask(1, "one")
    rig.model.wait_calls(1)
    rig.ask(2, "two")
    rig.summariser.end_late(time.monotonic() + 61)
    for id in (1, 2):
        end = rig.outputs.wait_end(id)
        assert isinstance(end, Failed) and end.status is Status.UNAVAILABLE
    rig.model.release("one")
    rig.ask(3, "three")
    assert isinstance(rig.outputs.wait_end(3), Finished), "the worker works again"
    rig.summariser.close()


def test_one_text_too_many_is_refused() -> None:
    rig = Rig(parallel_parts=1, max_texts=1)
    rig.model.held = {"one"}
    rig.ask(1, "one")
    rig.ask(2, "two")
    end = rig.outputs.wait_end(2)
    assert isinstance(end, Failed) and end.status is Status.UNAVAILABLE
    rig.model.release("one")
    rig.outputs.wait_end(1)
    rig.summariser.close()


@pytest.mark.parametrize(
    ("text", "parameters", "message"),
    [
        (None, b"", "text_input: is missing"),
        (b" \n", b"", "text_input: must not be empty"),
        (b"a\xff", b"", "text_input: is not valid UTF-8"),
        (b"a", b'{"part_bytes": 63}', "part_bytes: must be an integer from 64 to 1048576, got 63"),
        (b"a", b'{"max_tokens": "many"}', "max_tokens: must be an integer from 1 to 4096, got 'many'"),
        (b"a", b"[]", "sampling_parameters: must be a JSON object, got a list"),
        (b"a" * 64 * 4097, b'{"part_bytes": 64}', "text_input: makes 4097 parts"),
        (b"a" * (17 << 20), b"", "text_input: must hold at most 16777216 bytes"),
    ],
)
def test_bad_input_is_refused_by_name(rig: Rig, text: bytes | None, parameters: bytes, message: str) -> None:
    rig.summariser.submit(asked(1, text, parameters))
    end = rig.outputs.wait_end(1)
    assert isinstance(end, Failed) and end.status is Status.INVALID_ARGUMENT
    assert end.message.startswith(message)
    assert rig.model.calls == []


def test_a_text_of_far_too_many_parts_is_refused_without_being_split(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second and a half of Triton's thread otherwise."""
    monkeypatch.delattr(summarise, "split_parts")
    rig.summariser.submit(asked(1, b"a" * (16 << 20), b'{"part_bytes": 64}'))
    end = rig.outputs.wait_end(1)
    assert isinstance(end, Failed) and end.message.startswith("text_input: makes 262144 parts, at most 4096 are taken")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"params": {"return_output_ids": True}}, "return_output_ids"),
        ({"params": {"exclude_input_in_output": False}}, "exclude_input_in_output"),
        ({"params": {"timeout": 5}}, "timeout"),
        ({"params": {"input_ids": "1"}}, "input_ids"),
        ({"correlation": 7}, "sequence_id"),
    ],
)
def test_what_a_summary_can_not_honour_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(RequestError, match=name):
        read_text(request(FakeStub(), b"text", **fields), RequestId(1))


def test_the_priority_of_a_text_is_that_of_its_parts(rig: Rig) -> None:
    rig.summariser.submit(asked(1, b"one", parameters=b'{"priority": 3}'))
    rig.outputs.wait_end(1)
    assert rig.model.calls[0][2]["priority"] == 3


def test_settings_come_from_the_models_configuration_and_are_checked() -> None:
    def config(**values: str) -> dict[str, Any]:
        return {"parameters": {key: {"string_value": value} for key, value in values.items()}}

    assert read_settings({}) == Settings()
    assert read_settings(config(model="b", slice_tokens="8", EXECUTION_ENV_PATH="/x")) == Settings("b", slice_tokens=8)
    with pytest.raises(ConfigError, match=r"unknown setting 'modl'; did you mean 'model'\?"):
        read_settings(config(modl="b"))
    with pytest.raises(ConfigError, match="setting parallel_parts: must be an integer from 1 to 16, got '32'"):
        read_settings(config(parallel_parts="32"))


@pytest.mark.parametrize(("parameters", "limit_s"), [({}, 20), ({"drain_s": {"string_value": "3"}}, 3)])
def test_an_unload_waits_as_long_as_its_own_setting_says(
    monkeypatch: pytest.MonkeyPatch, parameters: Mapping[str, Any], limit_s: int
) -> None:
    limits: list[float] = []
    monkeypatch.setattr(Bridge, "limit_drain", lambda bridge, args, limit_s: limits.append(limit_s))
    bridge = start(FakeStub(), {"model_config": json.dumps({"parameters": parameters})})
    bridge.close()
    assert limits == [limit_s]


def test_the_prompt_ends_with_what_was_said_already() -> None:
    assert prompt_of("\nA text. ", " So").endswith("Text:\nA text.\n\nSummary: So")
