"""An engine at the other end of the bridge's link, played by the test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import Status
from minisgl_backend.messages.client import Chunk, Failed, Finished, FinishReason, Health, Output, Request, Started
from minisgl_backend.messages.ids import RequestId
from minisgl_backend.messages.tokens import pack_tokens

WAIT_S = 60.0


def started(id: int, num_input_tokens: int = 3, num_cached_tokens: int = 2) -> Started:
    return Started(RequestId(id), num_input_tokens, num_cached_tokens, queue_ms=1.5, ttft_ms=20.25)


def chunk(id: int, text: str, *tokens: int) -> Chunk:
    return Chunk(RequestId(id), text, pack_tokens(tokens))


def finished(id: int, text: str = "", reason: FinishReason = FinishReason.STOP, tokens: Sequence[int] = ()) -> Finished:
    return Finished(RequestId(id), text, pack_tokens(tokens), reason, 1, 1)


def failed(id: int, status: Status, message: str) -> Failed:
    return Failed(RequestId(id), status, message)


class FakeLink:
    """`open` is what the bridge is given. The test then speaks for the engine with `answer`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.config: EngineConfig | None = None
        self.requests: list[Request] = []
        self.cancelled: list[int] = []
        self.closed = 0
        self.refuse_start: Exception | None = None
        self.refuse_submit: Exception | None = None
        self.on_cancel: Callable[[int], None] | None = None  # called on the thread that cancels
        self.on_close: Callable[[], None] | None = None
        self.tell_health: Any = None
        self._on_outputs: Any = None

    def open(self, config: EngineConfig, on_outputs: Any, on_health: Any, progress: Any) -> FakeLink:
        if self.refuse_start is not None:
            raise self.refuse_start
        self.config, self._on_outputs, self.tell_health = config, on_outputs, on_health
        progress("loading the model")
        return self

    def submit(self, request: Request) -> None:
        if self.refuse_submit is not None:
            raise self.refuse_submit
        self.requests.append(request)

    def cancel(self, id: RequestId) -> None:
        with self._changed:
            self.cancelled.append(id)
            self._changed.notify_all()
        if self.on_cancel is not None:
            self.on_cancel(id)

    def close(self) -> None:
        self.closed += 1
        if self.on_close is not None:
            self.on_close()

    # ── the test's side ──────────────────────────────────────────────────────────────────────────────────────────

    def answer(self, *outputs: Output) -> None:
        """What the link's thread does with one step's outputs."""
        self._on_outputs(outputs)

    def health(self, state: Any, detail: str) -> None:
        self.tell_health(Health(state, detail))

    def wait_cancelled(self, count: int) -> list[int]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.cancelled) >= count, WAIT_S), "waited in vain"
            return list(self.cancelled)
