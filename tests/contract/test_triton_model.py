"""`model_repository/minisgl/1/model.py` against Triton's contract: a fake stub on one side, a fake engine on the other.

Every test ends with a check that nothing was done that would hang or crash a server (see `fakes.triton_stub`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fakes.engine_link import FakeLink, chunk, failed, finished
from fakes.triton_model import MODEL, Rig, initialize_args, loaded_module, running_model
from fakes.triton_stub import Answer, FakeStub, TritonError, TritonModelException, request, strings
from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import ModelNotFound, Status
from minisgl_backend.messages.client import EngineState, FinishReason
from minisgl_backend.serving.bridge import Bridge
from minisgl_backend.serving.sender import Outbox


@pytest.fixture
def rig() -> Iterator[Rig]:
    with running_model() as rig:
        yield rig


def test_a_stream_goes_from_triton_to_the_engine_and_back(rig: Rig) -> None:
    sender = rig.ask(b"Once", stream=True, id="client-7", tensors={"sampling_parameters": strings(b'{"top_k":1}')})
    (asked,) = rig.link.requests
    assert (asked.text_input, asked.parameters, asked.stream) == (b"Once", b'{"top_k":1}', True)
    rig.link.answer(chunk(asked.id, " upon"))
    sender.wait_answers(1)
    rig.link.answer(finished(asked.id, " a time", FinishReason.LENGTH))
    assert sender.wait_final().answers == [
        Answer(" upon", "None", None, None, False),
        Answer(" a time", "length", None, None, True),
    ]


def test_without_streaming_there_is_exactly_one_response(rig: Rig) -> None:
    sender = rig.ask()
    (asked,) = rig.link.requests
    assert not asked.stream
    rig.link.answer(finished(asked.id, "all of it"))
    assert sender.wait_final().answers == [Answer("all of it", "stop", None, None, True)]


def test_a_bad_request_among_good_ones_fails_alone(rig: Rig) -> None:
    good, bad, also_good = (
        request(rig.stub, b"1"),
        request(rig.stub, tensors={"text_input": strings(b"a", b"b")}),
        request(rig.stub, b"2"),
    )
    rig.execute(good, bad, also_good)
    (answer,) = bad.sender.answers
    assert (answer.code, answer.final) == (TritonError.INVALID_ARG, True)
    assert answer.error == "text_input: must hold exactly one value, got shape [2]"
    first, second = rig.link.requests
    rig.link.answer(finished(second.id, "two"), finished(first.id, "one"))
    assert good.sender.wait_final().text == "one"
    assert also_good.sender.wait_final().text == "two"


def test_a_feature_that_is_not_built_is_refused_as_unsupported(rig: Rig) -> None:
    sender = rig.ask(tensors={"image": strings(b"iVBOR")})
    assert [(a.code, a.final) for a in sender.answers] == [(TritonError.UNSUPPORTED, True)]
    assert rig.link.requests == []


def test_an_exception_while_reading_a_request_ends_it_without_telling_the_client_about_our_code(rig: Rig) -> None:
    broken = request(rig.stub)
    broken.timeout = lambda: 1 // 0  # type: ignore[method-assign]
    rig.execute(broken)
    (answer,) = broken.sender.answers
    assert (answer.error, answer.code, answer.final) == ("the request could not be read", TritonError.INTERNAL, True)
    assert "ZeroDivisionError" in rig.stub.Logger.with_level("error")[0]


def test_an_engine_that_can_not_be_reached_is_unavailable(rig: Rig) -> None:
    rig.link.refuse_submit = OSError("/run/secret/socket")
    sender = rig.ask()
    (answer,) = sender.wait_final().answers
    assert (answer.code, answer.final) == (TritonError.UNAVAILABLE, True)
    assert answer.error is not None and "/" not in answer.error


def test_a_failure_of_the_engine_reaches_every_client(rig: Rig) -> None:
    senders = [rig.ask(stream=True) for _ in range(8)]
    rig.link.answer(*(chunk(asked.id, "begun") for asked in rig.link.requests))
    rig.link.answer(*(failed(asked.id, Status.UNAVAILABLE, "the engine stopped") for asked in rig.link.requests))
    for sender in senders:
        assert [(a.error, a.code) for a in sender.wait_final().answers if a.final] == [
            ("the engine stopped", TritonError.UNAVAILABLE)
        ]


def test_two_requests_on_different_threads_do_not_meet_on_one_sender(rig: Rig) -> None:
    senders = [rig.ask(stream=True) for _ in range(16)]
    for piece in range(20):
        rig.link.answer(*(chunk(asked.id, f"{asked.id}.{piece} ") for asked in rig.link.requests))
    rig.link.answer(*(finished(asked.id) for asked in rig.link.requests))
    for sender, asked in zip(senders, rig.link.requests, strict=True):
        assert sender.wait_final().text == "".join(f"{asked.id}.{piece} " for piece in range(20))


def test_a_cancel_while_waiting_reaches_the_engine_and_the_client_still_gets_final(rig: Rig) -> None:
    sender = rig.ask(stream=True)
    (asked,) = rig.link.requests
    rig.link.on_cancel = lambda id: rig.link.answer(failed(id, Status.CANCELLED, "the client left"))
    sender.cancelled = True
    assert [(a.code, a.final) for a in sender.wait_final().answers] == [(TritonError.CANCELLED, True)]
    assert rig.link.cancelled == [asked.id]


def test_parameters_in_both_places_must_agree(rig: Rig) -> None:
    tensors = {"sampling_parameters": strings(b'{"max_tokens":"5"}')}
    rig.ask(tensors=tensors, params={"max_tokens": "5", "temperature": "0"})
    (asked,) = rig.link.requests
    assert json.loads(asked.parameters) == {"max_tokens": "5", "temperature": "0"}
    rig.link.answer(finished(asked.id))
    refused = rig.ask(tensors=tensors, params={"max_tokens": "6"})
    assert [(a.code, a.final) for a in refused.answers] == [(TritonError.INVALID_ARG, True)]
    assert "max_tokens" in str(refused.answers[0].error)


class WatchedOutbox(Outbox):
    """Tells when somebody waits for its replies to end."""

    waited_for: threading.Event

    def wait_idle(self, timeout_s: float) -> bool:
        self.waited_for.set()
        return super().wait_idle(timeout_s)


def opened(outbox: Outbox, stub: FakeStub, close_s: float) -> tuple[FakeLink, Bridge]:
    link = FakeLink()
    link.open(EngineConfig(), outbox.post, None, print)
    outbox.start(link.cancel)
    return link, Bridge(stub, link, outbox, close_s)


def test_closing_lets_answers_in_flight_end_before_it_closes_the_link() -> None:
    stub = FakeStub()
    outbox = WatchedOutbox(stub.Logger)
    outbox.waited_for = threading.Event()
    link, bridge = opened(outbox, stub, close_s=5.0)
    asked = request(stub, stream=True)
    bridge.execute([asked])
    finals_at_close: list[int] = []
    link.on_close = lambda: finals_at_close.append(asked.sender.finals)
    closing = threading.Thread(target=bridge.close)
    closing.start()
    assert outbox.waited_for.wait(60.0)
    link.answer(chunk(1, "who"))
    link.answer(finished(1, "le"))
    closing.join()
    assert asked.sender.text == "whole"
    assert finals_at_close == [1]
    assert not stub.violations


def test_closing_fails_what_does_not_end_in_time() -> None:
    stub = FakeStub()
    link, bridge = opened(Outbox(stub.Logger), stub, close_s=0.0)
    silent, answered = request(stub), request(stub)
    bridge.execute([silent, answered])
    link.on_close = lambda: link.answer(failed(link.requests[1].id, Status.CANCELLED, "closing"))
    bridge.close()
    assert [(a.code, a.final) for a in answered.sender.answers] == [(TritonError.CANCELLED, True)]
    assert [(a.code, a.final) for a in silent.sender.answers] == [(TritonError.UNAVAILABLE, True)]
    assert not stub.violations


def test_a_request_after_finalize_is_refused_and_not_lost(rig: Rig) -> None:
    rig.finalize()
    sender = rig.ask()
    assert [(a.code, a.final) for a in sender.answers] == [(TritonError.UNAVAILABLE, True)]


def test_what_runs_when_the_limit_of_an_unload_passes_is_ended_here_and_in_the_engine() -> None:
    stub = FakeStub()
    link, bridge = opened(Outbox(stub.Logger), stub, close_s=5.0)
    begun, waiting = request(stub, stream=True), request(stub)
    bridge.execute([begun, waiting])
    link.answer(chunk(1, "so far"))
    begun.sender.wait_answers(1)
    stub.lookup_says = "Failed for execute the inference request. Model 'minisgl' is not ready."
    bridge.limit_drain(initialize_args(), limit_s=0.0)
    assert begun.sender.wait_final().text == "so far"
    for sender in (begun.sender, waiting.sender.wait_final()):
        assert (sender.answers[-1].error, sender.answers[-1].code) == (
            "the model is being unloaded",
            TritonError.UNAVAILABLE,
        )
    assert sorted(link.wait_cancelled(2)) == [1, 2]
    bridge.close()
    assert not stub.violations and not stub.Logger.with_level("error")


def test_settings_of_the_repository_reach_the_engine(rig: Rig) -> None:
    assert rig.link.config is not None
    assert rig.link.config.model == "smollm2"


@pytest.mark.parametrize("where", ["engine", "settings"])
def test_a_start_that_fails_says_why_and_nothing_else(where: str) -> None:
    stub = FakeStub()
    with loaded_module(stub) as module:
        args = initialize_args(MODEL, {"page_siz": "8"} if where == "settings" else {})
        rig = Rig(module, stub, args)
        rig.link.refuse_start = ModelNotFound("smollm2 was never fetched; run: minisgl fetch smollm2")
        with pytest.raises(TritonModelException) as raised:
            rig.start()
    wanted = {
        "engine": "smollm2 was never fetched; run: minisgl fetch smollm2",
        "settings": "unknown setting 'page_siz'",
    }
    assert str(raised.value).startswith(wanted[where])
    assert str(raised.value).endswith("\0")  # else Triton puts file and line of our code behind it


def test_the_engines_progress_and_health_are_in_tritons_log(rig: Rig) -> None:
    rig.link.health(EngineState.RESTARTING, "the worker died")
    rig.link.health(EngineState.READY, "")
    assert rig.stub.Logger.lines == [
        "info minisgl: loading the model",
        "error minisgl: engine: the worker died",
        "info minisgl: engine: ready",
    ]


def test_the_stub_process_stays_light() -> None:
    """Nobody can restart it, so it loads no model code: not torch, not a tokenizer."""
    code = (
        "import sys, minisgl_backend.serving.bridge, minisgl_backend.actors.link\n"
        "print([name for name in ('torch', 'transformers', 'tokenizers', 'safetensors') if name in sys.modules])"
    )
    root = Path(__file__).resolve().parents[2]
    loaded = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


def test_importing_the_model_file_loads_nothing_of_ours() -> None:
    """Triton imports it twice, once only to complete the configuration."""
    code = (
        "import sys, types\n"
        "sys.modules['triton_python_backend_utils'] = types.ModuleType('stub')\n"
        f"exec(compile(open({str(MODEL / '1' / 'model.py')!r}).read(), 'model.py', 'exec'))\n"
        "print([name for name in sys.modules if name.startswith('minisgl') or name in ('numpy', 'zmq')])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


def test_a_boolean_input_is_read_whatever_its_rank(rig: Rig) -> None:
    rig.ask(tensors={"stream": np.array([[True]])})
    assert rig.link.requests[0].stream
    rig.link.answer(finished(rig.link.requests[0].id))
