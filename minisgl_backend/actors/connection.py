"""One connection to an engine host, from the side of who needs it; and the questions an inspector may ask.

    holder or inspector ── ToHost ──DEALER──►  door of the host
    holder or inspector ◄── ToHolder ────────

The kernel tells of the host's end (a pidfd), whatever its cause.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from minisgl_backend.actors.launch import Place, find
from minisgl_backend.actors.wire import endpoint, send_now
from minisgl_backend.errors import StartError
from minisgl_backend.messages.client import PROTOCOL, Health, Hello, Inspect, Retire, Stats, ToHolder, ToHost, Welcome
from minisgl_backend.messages.codec import Decoder, encode

_BACKLOG = 65_536
_WELCOME_S = 60.0


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
        except OSError:
            self._context.destroy(linger=0)
            raise
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
