"""`model_repository/minisgl_unary`: inputs and outputs of `minisgl`, one response to a request, any number in flight.

What both models share (reading, statuses, the end of a request) is shown with `minisgl` in test_triton_model.py and
test_inputs_and_outputs.py. The fake stub refuses what Triton refuses to a model that is not decoupled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from fakes.engine_link import chunk, failed, finished, started
from fakes.triton_model import MODEL, REPOSITORY, Rig, initialize_args, running_model
from fakes.triton_stub import Answer, TritonError, strings
from minisgl_backend.errors import Status
from minisgl_backend.messages.client import FinishReason
from minisgl_backend.serving.reply import LARGE_CHARS
from minisgl_backend.serving.settings import engine_config

UNARY = REPOSITORY / "minisgl_unary"


@pytest.fixture
def rig() -> Iterator[Rig]:
    with running_model(UNARY) as rig:
        yield rig


def test_inputs_and_outputs_are_those_of_minisgl() -> None:
    def declared(text: str) -> list[str]:
        return re.findall(r"\{ name: .*\}", text)

    texts = [(folder / "config.pbtxt").read_text() for folder in (MODEL, UNARY)]
    assert declared(texts[0]) == declared(texts[1]) != []
    assert ["decoupled: false" in text for text in texts] == [False, True]


def test_it_has_no_engine_settings_of_its_own() -> None:
    assert not (UNARY / "1" / "model.json").exists()
    assert engine_config(initialize_args(UNARY), {}) == engine_config(initialize_args(MODEL), {})


def test_many_requests_are_in_flight_and_each_is_answered_once_in_any_order(rig: Rig) -> None:
    senders = [rig.ask(str(number).encode()) for number in range(16)]
    requests = rig.link.requests
    assert [asked.text_input for asked in requests] == [str(number).encode() for number in range(16)]
    assert not any(asked.stream for asked in requests)
    for asked in reversed(requests):
        rig.link.answer(started(asked.id), chunk(asked.id, f"{asked.id} "))
        rig.link.answer(finished(asked.id, "whole", FinishReason.LENGTH))
    for sender, asked in zip(senders, requests, strict=True):
        assert sender.wait_final().answers == [Answer(f"{asked.id} whole", "length", None, None, True)]


def test_a_stream_is_refused_by_name_whichever_way_it_is_asked_for(rig: Rig) -> None:
    for sender in (rig.ask(stream=True), rig.ask(params={"stream": True})):
        (answer,) = sender.answers
        assert (answer.error, answer.code, answer.final) == (
            "stream: this model answers once; ask the model 'minisgl' for a stream",
            TritonError.UNSUPPORTED,
            True,
        )
    assert rig.link.requests == []
    rig.ask(stream=False)
    rig.link.answer(finished(rig.link.requests[0].id))


def test_an_error_of_the_engine_is_the_one_response(rig: Rig) -> None:
    sender = rig.ask(params={"timeout": 1000})
    (asked,) = rig.link.requests
    assert asked.timeout_us == 1000
    rig.link.answer(chunk(asked.id, "begun"), failed(asked.id, Status.UNAVAILABLE, "the deadline passed"))
    assert sender.wait_final().answers == [Answer(None, None, "the deadline passed", TritonError.UNAVAILABLE, True)]


def test_a_client_that_leaves_frees_its_request(rig: Rig) -> None:
    sender = rig.ask()
    (asked,) = rig.link.requests
    rig.link.on_cancel = lambda id: rig.link.answer(failed(id, Status.CANCELLED, "the client left"))
    sender.cancelled = True
    assert [(a.code, a.final) for a in sender.wait_final().answers] == [(TritonError.CANCELLED, True)]
    assert rig.link.cancelled == [asked.id]


def test_a_long_answer_is_one_response_and_final_follows_alone(rig: Rig) -> None:
    sender = rig.ask(tensors={"sampling_parameters": strings(json.dumps({"max_tokens": 9}).encode())})
    text = "x" * (LARGE_CHARS + 1)
    rig.link.answer(finished(rig.link.requests[0].id, text))
    whole, end = sender.wait_final().answers
    assert (whole.text, whole.final) == (text, False)
    assert (end.text, end.error, end.final) == (None, None, True)


def test_the_limit_of_an_unload_holds_for_it_as_well(rig: Rig) -> None:
    """The question whether the model stays is another one than `minisgl` asks: see the fake stub."""
    sender = rig.ask()
    rig.stub.lookup_says = "Failed for execute the inference request. Model 'minisgl_unary' is not ready."
    rig.model._bridge.limit_drain(initialize_args(UNARY), limit_s=0.0)
    (answer,) = sender.wait_final().answers
    assert (answer.error, answer.code) == ("the model is being unloaded", TritonError.UNAVAILABLE)
    assert rig.link.wait_cancelled(1) == [rig.link.requests[0].id]


def test_its_lines_in_the_log_carry_its_name(rig: Rig) -> None:
    assert rig.stub.Logger.lines == ["info minisgl_unary: loading the model"]
