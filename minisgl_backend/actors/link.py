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
from collections.abc import Callable
from concurrent.futures import Future

import zmq
import zmq.asyncio

from minisgl_backend.actors.connection import Connection
from minisgl_backend.actors.launch import Place, absolute, find_or_start
from minisgl_backend.actors.loop_thread import LoopThread
from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import EngineUnavailable, StartError, Status
from minisgl_backend.messages.client import (
    TERMINAL,
    Cancel,
    EngineState,
    Failed,
    Goodbye,
    Health,
    Output,
    Outputs,
    Request,
    Welcome,
)
from minisgl_backend.messages.ids import RequestId

_HOSTS_TRIED = 3  # that ended without a word before one was ready
_LONGEST_BACKOFF_S = 10.0
_log = logging.getLogger(__name__)

OnOutputs = Callable[[tuple[Output, ...]], None]
OnHealth = Callable[[Health], None]


class EngineLink:
    """Holds one lease. `submit` and `cancel` may be called from any thread and never wait."""

    def __init__(
        self, config: EngineConfig, on_outputs: OnOutputs, on_health: OnHealth, progress: Callable[[str], None]
    ) -> None:
        self._config = absolute(config)
        self._on_outputs = on_outputs
        self._on_health = on_health
        self._progress = progress  # until ready
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
        link = EngineLink(config, on_outputs, on_health, progress)
        link._thread.start()
        try:
            link._ready.result()
        except BaseException:
            link.close()
            raise
        return link

    def submit(self, request: Request) -> None:
        """`request.id` must be new on this link. Answered UNAVAILABLE while no engine is there; an operation is
        answered by the host, which may tell of its engine all the same.

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
        if not self._ready.done():
            self._ready.set_exception(error or EngineUnavailable("the link was closed"))
        elif error is not None:
            _log.error("the engine link ends", exc_info=error)
        self._fail_open(Status.CANCELLED, "the server is stopping")

    def _submit(self, request: Request) -> None:
        self._open_requests.add(request.id)
        if self._connection is None or (self._state is not EngineState.READY and request.operation is None):
            self._fail(request.id, Status.UNAVAILABLE, "the engine is not ready; try again in a moment")
            return
        try:
            self._connection.put(request)
        except zmq.ZMQError as error:  # 65,536 messages that the host did not take
            _log.error("the engine host takes no request: %s", error)
            self._fail(request.id, Status.UNAVAILABLE, "the engine is overloaded; try again later")

    def _cancel(self, id: RequestId) -> None:
        if id in self._open_requests and self._connection is not None:
            with contextlib.suppress(zmq.ZMQError):  # then it runs to its end
                self._connection.put(Cancel(id))

    async def _live(self) -> None:
        """One host after another, until closed or until the first start has failed."""
        unready_hosts, backoff_s = 0, 0.0
        while True:
            problem: Exception = StartError("the engine host ended")
            try:
                place = await asyncio.to_thread(find_or_start, self._config)
                problem = StartError(f"the engine host ends at its start; its log: {place.run_dir / 'engine.log'}")
                was_ready = await self._with_host(place)
                unready_hosts = 0 if was_ready else unready_hosts + 1
            except Exception as error:
                was_ready, unready_hosts, problem = False, _HOSTS_TRIED, error
            if not self._ready.done() and unready_hosts >= _HOSTS_TRIED:
                if not isinstance(problem, StartError):
                    raise StartError(f"the engine can not start: {type(problem).__name__}: {problem}") from problem
                raise problem
            if not was_ready:
                _log.error("no engine: %s", problem)
            self._lose_host("the engine host is lost; another is found or started" if was_ready else str(problem))
            backoff_s = 0.1 if was_ready else min(2 * backoff_s + 0.5, _LONGEST_BACKOFF_S)
            await asyncio.sleep(backoff_s)

    async def _with_host(self, place: Place) -> bool:
        """Lives with one host until it ends or wants us no more. True when it was ever ready.

        Raises StartError when it says that it can not start.
        """
        was_ready = False
        with Connection(place, lease=True) as connection:
            self._connection = connection
            try:
                async for message in connection.messages():
                    if isinstance(message, Outputs):
                        self._take(message.items)
                    elif isinstance(message, Welcome | Health):
                        health = message.health if isinstance(message, Welcome) else message
                        if health.state is EngineState.STOPPING:
                            break
                        if health.state is EngineState.FAILED and not was_ready:
                            error = StartError(health.detail)
                            error.exit_code = health.exit_code
                            raise error
                        was_ready |= health.state is EngineState.READY
                        self._set_state(health)
            finally:
                self._connection = None
                with contextlib.suppress(zmq.ZMQError):
                    connection.put(Goodbye())
        return was_ready

    def _lose_host(self, reason: str) -> None:
        self._fail_open(Status.UNAVAILABLE, "the engine stopped unexpectedly; try again in a moment")
        self._set_state(Health(EngineState.RESTARTING, reason))

    def _set_state(self, health: Health) -> None:
        self._state = health.state
        if not self._ready.done():
            self._progress(health.detail or health.state.value)
        self._on_health(health)
        if health.state is EngineState.READY and not self._ready.done():
            self._ready.set_result(None)

    def _take(self, outputs: tuple[Output, ...]) -> None:
        for output in outputs:
            if isinstance(output, TERMINAL):
                self._open_requests.discard(output.id)
        self._on_outputs(outputs)

    def _fail(self, id: RequestId, status: Status, message: str) -> None:
        self._take((Failed(id, status, message),))

    def _fail_open(self, status: Status, message: str) -> None:
        for id in sorted(self._open_requests):
            self._fail(id, status, message)
