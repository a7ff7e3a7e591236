"""A ZeroMQ socket of an event loop that both sends and receives: the two ends of the front door.

ZeroMQ's file descriptor tells of a change, not of a state: whatever call on the socket comes next may swallow what it
told. So after every send we look whether messages have come, and we wait only after a receive has found nothing. A
future is made where somebody has to wait, and nowhere else: zmq.asyncio makes several for each message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import zmq

BACKLOG = 65_536
"""Messages kept in each direction for a peer that does not read."""


_POLLIN = int(zmq.POLLIN)  # the enum's own "and" is slow


class LoopSocket:
    """Owns `socket` (bound or connected by its owner) and closes it. Used in the loop that runs when it is made."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.SNDHWM, BACKLOG)
        socket.setsockopt(zmq.RCVHWM, BACKLOG)
        self.raw = socket
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._look)

    def send_now(self, frames: Sequence[bytes]) -> None:
        """Without waiting. Raises zmq.Again when the peer's mailbox is full, zmq.ZMQError when it is gone."""
        try:
            self.raw.send_multipart(frames, zmq.NOBLOCK)
        finally:
            self._look()

    def receive_now(self) -> list[bytes] | None:
        """The frames of the next message if one is here."""
        try:
            return self.raw.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    async def receive(self) -> list[bytes]:
        """Waits for the next message. One reader at a time."""
        while (frames := self.receive_now()) is None:
            await self.changed()
        return frames

    async def changed(self) -> None:
        """Waits until a message may be here, or `wake` is called. To be awaited after receive_now has found nothing."""
        assert self._waiter is None, "two readers"
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        """Ends the wait of `changed`."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def closed(self) -> bool:
        return self.raw.closed

    def close(self, linger_ms: int) -> None:
        """What was sent may still go out for so long: the end of the context waits for it."""
        if not self.raw.closed:
            self._loop.remove_reader(self._fd)
            self.raw.close(linger_ms)

    def _look(self) -> None:
        """Reading EVENTS is what makes ZeroMQ take note of what its descriptor told."""
        if not self.raw.closed and int(self.raw.getsockopt(zmq.EVENTS)) & _POLLIN:
            self.wake()
