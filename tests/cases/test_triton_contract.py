"""Reports against other servers on Triton that this surface can meet, by the number of the report (class TR).

Shown here with a fake stub that is stricter than Triton's own; the real server repeats what it can in tests/e2e.
"""

from __future__ import annotations

import json
import queue
import threading
from typing import Any

import numpy as np
import pytest

from fakes.engine_link import failed, finished
from fakes.triton_model import Rig, running_model
from fakes.triton_stub import FakeStub, request, strings
from minisgl_backend.errors import Status
from minisgl_backend.serving.outputs import Wanted
from minisgl_backend.serving.reply import Reply

RACES = 1000


@pytest.mark.slow
def test_tr_02_an_abort_that_races_the_natural_end_gives_exactly_one_final() -> None:
    """triton-inference-server/server #7292: a response after FINAL, or FINAL twice, crashes the server.

    Each request ends naturally at the moment when its thread learns of the cancel; the engine answers both.
    """
    with running_model() as rig:
        ends: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        engine = threading.Thread(target=_end_each, args=(rig, ends))
        engine.start()
        rig.link.on_cancel = lambda id: rig.link.answer(failed(id, Status.CANCELLED, "the client left"))
        senders = [_asked_to_end(rig, ends, id) for id in range(1, RACES + 1)]
        for sender in senders:
            sender.wait_final()
        ends.put(None)
        engine.join()
    assert {sender.finals for sender in senders} == {1}
    assert {len(sender.answers) for sender in senders} == {1}


def _asked_to_end(rig: Rig, ends: queue.SimpleQueue[int | None], id: int) -> Any:
    asked = request(rig.stub, stream=True)
    asked.sender.cancelled = True
    asked.sender.on_poll = lambda: ends.put(id)
    rig.execute(asked)
    assert rig.link.requests[-1].id == id
    return asked.sender


def _end_each(rig: Rig, ends: queue.SimpleQueue[int | None]) -> None:
    while (id := ends.get()) is not None:
        rig.link.answer(finished(id, "the end"))


def test_tr_02_send_final_send_final_reaches_triton_once() -> None:
    """triton-inference-server/python_backend #328."""
    stub = FakeStub()
    sender = request(stub).sender
    reply = Reply(stub, sender, True, Wanted())
    for _ in range(2):
        reply.give([finished(1, "x")])
        reply.fail(Status.INTERNAL, "late")
    assert len(sender.answers) == sender.finals == 1
    assert len(stub.Logger.with_level("error")) == 3
    assert not stub.violations


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
@pytest.mark.parametrize("prompt", [b"a\x00b\x00", b"", "é😀".encode(), b"\xff\xfe"])
def test_tr_09_bytes_reach_the_engine_and_come_back_exactly(prompt: bytes, shape: tuple[int, ...]) -> None:
    """triton-inference-server/server #2524, #2551; python_backend #82: trailing zeros lost, empty strings broken.

    The bridge judges no bytes: bad UTF-8 and the empty prompt get their answer from the engine's validation.
    """
    with running_model() as rig:
        sender = rig.ask(tensors={"text_input": strings(prompt, shape=shape)})
        (asked,) = rig.link.requests
        assert asked.text_input == prompt
        text = prompt.decode("utf-8", errors="replace")
        rig.link.answer(finished(asked.id, text))
        assert sender.wait_final().text == text


def test_tr_10_a_list_in_the_sampling_parameters_tensor_arrives_as_a_list() -> None:
    """triton-inference-server/server #7682: lists can not be passed as request parameters.

    Triton itself refuses them there, on gRPC in the client and over HTTP with status 400; the tensor is the way.
    """
    with running_model() as rig:
        rig.ask(tensors={"sampling_parameters": strings(b'{"stop":["a","b"]}')}, params={"temperature": 0.5})
        (asked,) = rig.link.requests
        assert json.loads(asked.parameters) == {"stop": ["a", "b"], "temperature": 0.5}
        rig.link.answer(finished(asked.id))


def test_tr_10_list_inputs_arrive_whole() -> None:
    with running_model() as rig:
        rig.ask(tensors={"stop_words": strings(b"a", b"b"), "stop_token_ids": np.array([1, 2], dtype=np.int32)})
        rig.ask(params={"stop_words": "a", "stop_token_ids": "[1,2]"})
        first, second = rig.link.requests
        assert json.loads(first.parameters) == {"stop_words": ["a", "b"], "stop_token_ids": [1, 2]}
        assert json.loads(second.parameters) == {"stop_words": "a", "stop_token_ids": "[1,2]"}
        rig.link.answer(finished(first.id), finished(second.id))
