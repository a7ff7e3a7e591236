"""The bridge: Triton's side of the path of a request.

    Triton ── execute ──► Bridge ── Request ──► link ──► engine host
    Triton ◄── responses ── sender threads ◄── Outputs ── link

Where it stands in the flow: made by `model.py`, lives in Triton's Python stub. It stays small, because nobody can
restart the stub: no model, no tokenizer, no torch.
"""

from __future__ import annotations

import itertools
import os
import traceback
from collections.abc import Callable, Mapping, Sequence

from minisgl_backend.errors import RequestError, StartError, Status
from minisgl_backend.messages.client import EngineState, Failed, Health, Request
from minisgl_backend.messages.ids import RequestId
from minisgl_backend.serving.drain import Watch
from minisgl_backend.serving.link import Link, OpenLink
from minisgl_backend.serving.outputs import Form, Wanted
from minisgl_backend.serving.presence import asker
from minisgl_backend.serving.reply import Reply
from minisgl_backend.serving.sender import UNLOADED, Outbox
from minisgl_backend.serving.settings import bridge_config, engine_config
from minisgl_backend.serving.tensors import read_request
from minisgl_backend.serving.triton import InferenceRequest, Logger, TritonStub, load_error

CLOSE_S = 10.0
"""How long `close` waits for the answers still open. Triton unloads a model after its last answer, so there are none
unless something went wrong."""

STOP_S = 5.0
"""How long `close` waits for the threads to end."""

ReadRequest = Callable[[InferenceRequest, RequestId], tuple[Request, Form]]
"""Triton's request → ours, and the form of its responses: together a dialect. Copies everything out of Triton's
memory; raises RequestError, naming the field."""


class Bridge:
    """One Triton model instance: takes its requests and owns its sender threads and its link to the engine."""

    def __init__(
        self,
        stub: TritonStub,
        link: Link,
        outbox: Outbox,
        close_s: float = CLOSE_S,
        *,
        name: str = "minisgl",
        read: ReadRequest = read_request,
    ) -> None:
        """name: of the Triton model, for its log. read: one request of Triton's → ours."""
        self._stub = stub
        self._link = link
        self._outbox = outbox
        self._close_s = close_s
        self._name = name
        self._read = read
        self._ids = itertools.count(1)
        self._closed = False
        self._watch: Watch | None = None

    @staticmethod
    def start(
        stub: TritonStub, args: Mapping[str, str], open_link: OpenLink, read: ReadRequest = read_request
    ) -> Bridge:
        """Reads the settings, opens the link (which blocks until the engine is ready) and starts to send.

        Models of different dialects (`read`) with the same engine settings share one engine: each holds a lease.
        `args` are those of `TritonPythonModel.initialize`. Raises the stub's TritonModelException with a message for
        the operator, which Triton puts into its log and into the error of the load request.
        """
        outbox = Outbox(stub.Logger)
        name = args["model_name"]
        log = _EngineLog(stub.Logger, name)
        try:
            config, own = engine_config(args, os.environ), bridge_config(args, os.environ)
            link = open_link(config, outbox.post, log.health, log.progress)
        except StartError as error:
            raise load_error(stub, error) from None
        outbox.start(link.cancel)
        bridge = Bridge(stub, link, outbox, name=name, read=read)
        bridge.limit_drain(args, own.drain_s)
        return bridge

    def limit_drain(self, args: Mapping[str, str], limit_s: float) -> None:
        """From now on answers still open `limit_s` after the server began to unload this model are ended with an
        error. `args` are those of `initialize`; called once, at its end.
        """
        ask, log = asker(self._stub, args), self._stub.Logger
        self._watch = Watch(ask, limit_s, log, self._name, self._outbox.is_busy, self._end_all)
        self._watch.start()

    def execute(self, requests: Sequence[InferenceRequest]) -> None:
        """Takes requests and returns at once; they are answered from the sender threads. A bad one fails alone."""
        for request in requests:
            self._take(request)

    def close(self) -> None:
        """Refuses new requests, lets the open ones end (for `close_s`), fails what is left, gives the lease back."""
        self._closed = True
        if self._watch is not None and not self._watch.stop(STOP_S):
            self._stub.Logger.log_warn(f"{self._name}: Triton owes an answer to the question whether the model stays")
        if not self._outbox.wait_idle(self._close_s):
            self._stub.Logger.log_warn(f"{self._name}: answers still open after {self._close_s:g} s are failed")
        try:
            self._link.close()
        finally:
            if not self._outbox.stop(STOP_S):
                self._stub.Logger.log_error(f"{self._name}: a sender thread did not end within {STOP_S:g} s")
            self._stub.Logger.log_info(f"{self._name}: unloaded")

    def _end_all(self) -> None:
        for id in self._outbox.fail_all(Status.UNAVAILABLE, UNLOADED):
            self._link.cancel(id)

    def _take(self, request: InferenceRequest) -> None:
        id = RequestId(next(self._ids))
        sender = request.get_response_sender()
        try:
            message, form = self._read(request, id)
        except RequestError as error:
            return Reply(self._stub, sender, False, Wanted()).fail(error.status, str(error))
        except Exception:
            self._log_exception()
            return Reply(self._stub, sender, False, Wanted()).fail(Status.INTERNAL, "the request could not be read")
        reply = Reply(self._stub, sender, message.stream, form)
        if self._closed:
            return reply.fail(Status.UNAVAILABLE, UNLOADED)
        self._outbox.open(id, reply)
        try:
            self._link.submit(message)
        except Exception:
            self._log_exception()
            self._outbox.post([Failed(id, Status.UNAVAILABLE, "the engine can not be reached")])

    def _log_exception(self) -> None:
        self._stub.Logger.log_error(f"{self._name}: {traceback.format_exc()}")


class _EngineLog:
    """Writes the engine's progress and health to Triton's log. Called from the link's thread."""

    def __init__(self, log: Logger, name: str) -> None:
        self._log = log
        self._name = name  # of the Triton model

    def progress(self, line: str) -> None:
        self._log.log_info(f"{self._name}: {line}")

    def health(self, health: Health) -> None:
        if health.state is EngineState.STARTING:
            return  # told as progress
        line = f"{self._name}: engine: {health.detail or health.state.value}"
        if health.state in (EngineState.RESTARTING, EngineState.FAILED):
            self._log.log_error(line)
        else:
            self._log.log_info(line)
