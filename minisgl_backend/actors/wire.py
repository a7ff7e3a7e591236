"""Mailboxes between processes: ZeroMQ PUSH → PULL over a local socket, msgpack frames checked against a schema.

The receiver binds, senders connect. The sockets lie in a folder only their owner can enter (actors/rundir.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

from minisgl_backend.actors.mailbox import Undeliverable
from minisgl_backend.messages.codec import Decoder, encode

M = TypeVar("M")

_log = logging.getLogger(__name__)


def endpoint(path: Path) -> str:
    """The ZeroMQ address of a local socket."""
    return f"ipc://{path}"


def send_now(socket: zmq.asyncio.Socket, frames: Sequence[bytes]) -> None:
    """Sends without waiting. Raises zmq.Again when the peer's mailbox is full, zmq.ZMQError when it is gone.

    Goes through the asyncio socket, never around it: a send may swallow the wake-up of a message that came in
    meanwhile, and only the asyncio socket knows to look again for its waiting reader.
    """
    sent: asyncio.Future[Any] = asyncio.ensure_future(socket.send_multipart(frames, zmq.NOBLOCK))
    sent.result()


class WireInbox(Generic[M]):
    """Binds `path` and receives messages of `union` (a frame that does not fit the schema is logged and left out)."""

    def __init__(self, context: zmq.asyncio.Context, path: Path, union: Any, capacity: int) -> None:
        self._socket: zmq.asyncio.Socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, capacity)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint(path))
        self._now: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)
        self._decoder: Decoder[M] = Decoder(union)

    async def receive(self) -> M:
        while True:
            frame = await self._socket.recv()
            if (message := self._decode(frame)) is not None:
                return message

    def receive_nowait(self) -> M | None:
        while True:
            try:
                frame = self._now.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if (message := self._decode(frame)) is not None:
                return message

    def _decode(self, frame: bytes) -> M | None:
        try:
            return self._decoder.decode(frame)
        except msgspec.DecodeError as error:
            _log.error("a message of %d bytes does not fit its schema and is left out: %s", len(frame), error)
            return None

    def close(self) -> None:
        self._socket.close()


class WireOutlet(Generic[M]):
    """Connects to the inbox at `path`; the inbox need not be bound yet."""

    def __init__(self, context: zmq.asyncio.Context, path: Path, capacity: int) -> None:
        self._socket: zmq.asyncio.Socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, capacity)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.connect(endpoint(path))

    async def send(self, message: M) -> None:
        await self._socket.send(encode(message))  # type: ignore[arg-type]

    def put(self, message: M) -> None:
        try:
            send_now(self._socket, (encode(message),))  # type: ignore[arg-type]
        except zmq.Again:
            raise Undeliverable("the receiving process does not read") from None
        except zmq.ZMQError as error:  # closed: its group is being stopped
            raise Undeliverable(f"the receiving process is gone ({error})") from None

    def close(self) -> None:
        self._socket.close()
