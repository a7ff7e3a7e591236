"""The holder's end: what Triton's stub, a test or a tool has of an engine in other processes.

    submit, cancel (any thread) ──► loop of the link's own thread ──DEALER──► door of the host
    on_outputs, on_health ◄────────

Every request submitted gets exactly one terminal output. When the host dies, the link itself answers what was in
flight with UNAVAILABLE, then starts a host again (or finds the one that another holder has started).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from minisgl_backend.actors.launch import Place, absolute, find, find_or_start
from minisgl_backend.actors.loop_thread import LoopThread
from minisgl_backend.actors.wire import endpoint, send_now
from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import EngineUnavailable, StartError, Status
from minisgl_backend.messages.client import (
    PROTOCOL,
    Cancel,
    Chunk,
    EngineState,
    Failed,
    Goodbye,
    Health,
    Hello,
    Inspect,
    Output,
    Outputs,
    Request,
    Retire,
    Stats,
    ToHolder,
    ToHost,
    Welcome,
)
from minisgl_backend.messages.codec import Decoder, encode
from minisgl_backend.messages.ids import RequestId

_BACKLOG = 65_536
_WELCOME_S = 60.0
_LONGEST_BACKOFF_S = 10.0
_log = logging.getLogger(__name__)

OnOutputs = Callable[[tuple[Output, ...]], None]
OnHealth = Callable[[Health], None]


class EngineLink:
    """Holds one lease. `submit` and `cancel` may be called from any thread and never wait."""

    def __init__(self, config: EngineConfig, on_outputs: OnOutputs, on_health: OnHealth) -> None:
        self._config = absolute(config)
        self._on_outputs = on_outputs
        self._on_health = on_health
        self._ready: Future[None] = Future()
        self._thread = LoopThread("minisgl-link", self._live, self._at_end)
        self._open_requests: set[RequestId] = set()
        self._connection: Connection | None = None
        self._state = EngineState.STARTING

    @staticmethod
    def open(
        config: EngineConfig, on_outputs: OnOutputs, on_health: OnHealth, progress: Callable[[str], None]
    ) -> EngineLink:
        """Starts the engine or attaches to the warm one; returns when it is ready.

        Raises StartError, with the engine's own reason and exit code. Outputs and health changes are reported from
        the link's thread; the callbacks must return quickly.
        """

        def tell(health: Health) -> None:
            if not link._ready.done():
                progress(health.detail or health.state.value)
            on_health(health)

        link = EngineLink(config, on_outputs, tell)
        link._thread.start()
        try:
            link._ready.result()
        except BaseException:
            link.close()
            raise
        return link

    def submit(self, request: Request) -> None:
        """`request.id` must be new on this link. Answered UNAVAILABLE while no engine is there.

        Raises EngineUnavailable, and answers nothing, when the link is closed.
        """
        if not self._thread.call(self._submit, request):
            raise EngineUnavailable("the server is stopping")

    def cancel(self, id: RequestId) -> None:
        """Asks for the end of a request; its terminal output still comes. Unknown ids are ignored."""
        self._thread.call(self._cancel, id)

    def close(self) -> None:
        """Gives the lease back. Requests still open are answered CANCELLED. Idempotent."""
        self._thread.stop()

    # ── in the link's thread ─────────────────────────────────────────────────────────────────────────────────────

    def _at_end(self, error: BaseException | None) -> None:
        if error is not None:
            _log.error("the engine link ends", exc_info=error)
        if not self._ready.done():
            self._ready.set_exception(error or EngineUnavailable("the link was closed"))
        self._fail_open(Status.CANCELLED, "the server is stopping")

    def _submit(self, request: Request) -> None:
        self._open_requests.add(request.id)
        if self._connection is None or self._state is not EngineState.READY:
            self._fail(request.id, Status.UNAVAILABLE, "the engine is not ready; try again in a moment")
        else:
            self._connection.put(request)

    def _cancel(self, id: RequestId) -> None:
        if id in self._open_requests and self._connection is not None:
            self._connection.put(Cancel(id))

    async def _live(self) -> None:
        """One host after another, until closed or the first start fails."""
        backoff_s = 0.0
        while True:
            try:
                place = await asyncio.to_thread(find_or_start, self._config)
                backoff_s = 0.5 if await self._with_host(place) else min(2 * backoff_s + 0.5, _LONGEST_BACKOFF_S)
            except StartError as error:
                if not self._ready.done():
                    self._ready.set_exception(error)
                    return
                self._set_state(Health(EngineState.FAILED, str(error), error.exit_code))
                backoff_s = _LONGEST_BACKOFF_S
            await asyncio.sleep(backoff_s if self._ready.done() else 0.1)

    async def _with_host(self, place: Place) -> bool:
        """Lives with one host until it ends. True when it was ever ready."""
        was_ready = False
        with Connection(place, lease=True) as connection:
            self._connection = connection
            try:
                async for message in connection.messages():
                    if isinstance(message, Outputs):
                        self._take(message.items)
                    elif isinstance(message, Welcome | Health):
                        health = message.health if isinstance(message, Welcome) else message
                        if health.state is EngineState.FAILED and not self._ready.done():
                            error = StartError(health.detail)
                            error.exit_code = health.exit_code
                            raise error
                        self._set_state(health)
                        was_ready |= health.state is EngineState.READY
                        if was_ready and not self._ready.done():
                            self._ready.set_result(None)
            finally:
                self._connection = None
                with contextlib.suppress(zmq.ZMQError):
                    connection.put(Goodbye())
        self._set_state(Health(EngineState.RESTARTING, "the engine host ended; it is being started again"))
        self._fail_open(Status.UNAVAILABLE, "the engine stopped unexpectedly; try again in a moment")
        return was_ready

    def _set_state(self, health: Health) -> None:
        self._state = health.state
        self._on_health(health)

    def _take(self, outputs: tuple[Output, ...]) -> None:
        for output in outputs:
            if not isinstance(output, Chunk):
                self._open_requests.discard(output.id)
        self._on_outputs(outputs)

    def _fail(self, id: RequestId, status: Status, message: str) -> None:
        self._take((Failed(id, status, message),))

    def _fail_open(self, status: Status, message: str) -> None:
        for id in sorted(self._open_requests):
            self._fail(id, status, message)


class Connection:
    """One DEALER to one host, and the eye on its process."""

    def __init__(self, place: Place, *, lease: bool) -> None:
        self._place = place
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, _BACKLOG)
        self._socket.setsockopt(zmq.RCVHWM, _BACKLOG)
        self._decoder: Decoder[ToHolder] = Decoder(ToHolder)
        self._lease = lease
        self._died: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pidfd: int | None = None

    def __enter__(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            self._pidfd = os.pidfd_open(self._place.pid)
            loop.add_reader(self._pidfd, self._on_death)
        except ProcessLookupError:
            self._on_death()
        self._socket.connect(endpoint(self._place.run_dir / "door"))
        self.put(Hello(PROTOCOL, os.getpid(), self._lease))
        return self

    def __exit__(self, *_: object) -> None:
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._context.destroy(linger=0 if self._died.done() else 1000)

    def put(self, message: ToHost) -> None:
        send_now(self._socket, (encode(message),))

    def _on_death(self) -> None:
        if not self._died.done():
            self._died.set_result(None)
            if self._pidfd is not None:
                asyncio.get_running_loop().remove_reader(self._pidfd)

    async def messages(self) -> AsyncIterator[ToHolder]:
        """ToHolder messages until the host's process ends. Raises StartError when it never says Welcome."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _WELCOME_S
        welcomed = False
        while True:
            receiving: asyncio.Future[Any] = asyncio.ensure_future(self._socket.recv())
            patience = None if welcomed else max(0.0, deadline - loop.time())
            try:
                await asyncio.wait({receiving, self._died}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not receiving.done():
                    receiving.cancel()
            if receiving.done() and not receiving.cancelled():
                message = self._decoder.decode(receiving.result())
                welcomed |= isinstance(message, Welcome)
                yield message
            elif self._died.done():
                return
            else:
                raise StartError(f"the engine host (pid {self._place.pid}) does not answer; see its engine.log")


async def inspect(run_dir: Path) -> Stats | None:
    """What the living engine of this folder holds now; None when there is none. Takes no lease."""
    place = find(run_dir)
    if place is None:
        return None
    with Connection(place, lease=False) as connection:
        connection.put(Inspect())
        async for message in connection.messages():
            if isinstance(message, Stats):
                return message
    return None


async def retire(run_dir: Path) -> bool:
    """Ends the living engine of this folder unless somebody holds a lease. True when none is left."""
    place = find(run_dir)
    if place is None:
        return True
    with Connection(place, lease=False) as connection:
        connection.put(Retire())
        async for message in connection.messages():
            if isinstance(message, Health):
                return False
    return True
