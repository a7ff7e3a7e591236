"""One connection to an engine host, from the side of who needs it; and the questions an inspector may ask.

    holder or inspector ── ToHost ──DEALER──►  door of the host
    holder or inspector ◄── ToHolder ────────

The kernel tells of the host's end (a pidfd), whatever its cause. Who holds a lease kills a host that was stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import zmq

from minisgl_backend.actors.launch import Place, find
from minisgl_backend.actors.loop_socket import LoopSocket
from minisgl_backend.actors.stopped import PATIENCE_S, until_stopped
from minisgl_backend.actors.wire import endpoint
from minisgl_backend.errors import StartError
from minisgl_backend.messages.client import PROTOCOL, Health, Hello, Inspect, Retire, Stats, ToHolder, ToHost, Welcome
from minisgl_backend.messages.codec import Decoder, encode

_WELCOME_S = 60.0
_log = logging.getLogger(__name__)


class Connection:
    """One DEALER to one host, and the eye on its process."""

    def __init__(self, place: Place, *, lease: bool) -> None:
        self._place = place
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = LoopSocket(self._context.socket(zmq.DEALER))
        self._decoder: Decoder[ToHolder] = Decoder(ToHolder)
        self._lease = lease
        self._died = False
        self._pidfd: int | None = None
        self._watching: asyncio.Task[None] | None = None

    def __enter__(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            self._pidfd = os.pidfd_open(self._place.pid)
            loop.add_reader(self._pidfd, self._on_death)
        except ProcessLookupError:
            self._on_death()
        except OSError:
            self._close(0)
            raise
        if self._lease and self._pidfd is not None:
            self._watching = loop.create_task(self._watch_stopped(self._pidfd))
        self._socket.raw.connect(endpoint(self._place.run_dir / "door"))
        self.put(Hello(PROTOCOL, os.getpid(), self._lease))
        return self

    def __exit__(self, *_: object) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._close(0 if self._died else 1000)

    def put(self, message: ToHost) -> None:
        self._socket.send_now((encode(message),))

    def _close(self, linger_ms: int) -> None:
        self._socket.close(linger_ms)
        self._context.term()

    def _on_death(self) -> None:
        self._died = True
        self._socket.wake()
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)

    async def _watch_stopped(self, pidfd: int) -> None:
        await until_stopped(self._place.pid)
        _log.error("the engine host (pid %d) was stopped by a signal for %g s: killed", self._place.pid, PATIENCE_S)
        with contextlib.suppress(OSError):  # it has ended meanwhile
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    async def messages(self) -> AsyncIterator[ToHolder]:
        """ToHolder messages until the host's process ends. Raises StartError when it never says Welcome."""
        loop = asyncio.get_running_loop()
        deadline: float | None = loop.time() + _WELCOME_S  # None: it has said Welcome
        while True:
            frames = self._socket.receive_now()
            if frames is not None:
                message = self._decoder.decode(frames[-1])
                if isinstance(message, Welcome):
                    deadline = None
                yield message
                await asyncio.sleep(0)  # a host that never pauses must not keep what we have to say back
            elif self._died:
                return
            else:
                await self._changed(deadline)

    async def _changed(self, deadline: float | None) -> None:
        """Until there may be a message, or the host's process has ended."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._socket.changed()
        except TimeoutError:
            silent = f"the engine host (pid {self._place.pid}) does not answer; see its engine.log"
            raise StartError(silent) from None


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
