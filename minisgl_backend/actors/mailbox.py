"""Mailboxes: the only way one actor reaches another.

An actor owns one `Inbox` and holds `Outlet`s to others. Two implementations of both: `LocalMailbox` within a process
(here) and `WireInbox`/`WireOutlet` between processes (actors/wire.py); an actor's code does not know which it has.

Every mailbox is bounded. What happens when one is full is chosen at the call: `send` waits, `put` refuses with
Undeliverable. Nothing is ever dropped silently. Only the few messages on which all else depends (a death, the end
of a lease) may pass the bound of a LocalMailbox, by `post`.
"""

from __future__ import annotations

import asyncio
from typing import Generic, Protocol, TypeVar

M = TypeVar("M")
M_co = TypeVar("M_co", covariant=True)
M_contra = TypeVar("M_contra", contravariant=True)


class Undeliverable(Exception):
    """The receiver is gone, or so far behind that, at the bounds we choose, it is stuck."""


class Inbox(Protocol[M_co]):
    """The receiving end; one owner."""

    async def receive(self) -> M_co:
        """Waits for the next message."""
        ...

    def receive_nowait(self) -> M_co | None:
        """The next message if one is here."""
        ...

    def close(self) -> None: ...


class Outlet(Protocol[M_contra]):
    """A sending end. Messages of one outlet arrive in order."""

    async def send(self, message: M_contra) -> None:
        """Waits while the mailbox is full."""
        ...

    def put(self, message: M_contra) -> None:
        """Raises Undeliverable instead of waiting."""
        ...

    def close(self) -> None: ...


class LocalMailbox(Generic[M]):
    """Both ends of a mailbox within one event loop."""

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self._capacity = capacity
        self._queue: asyncio.Queue[M] = asyncio.Queue()
        self._taken = asyncio.Event()  # set when a message was taken since somebody found the mailbox full

    async def receive(self) -> M:
        message = await self._queue.get()
        self._taken.set()
        return message

    def receive_nowait(self) -> M | None:
        if self._queue.empty():
            return None
        self._taken.set()
        return self._queue.get_nowait()

    async def send(self, message: M) -> None:
        while self._queue.qsize() >= self._capacity:
            self._taken.clear()
            await self._taken.wait()
        self._queue.put_nowait(message)

    def put(self, message: M) -> None:
        if self._queue.qsize() >= self._capacity:
            raise Undeliverable(f"{self._capacity} messages are waiting")
        self._queue.put_nowait(message)

    def post(self, message: M) -> None:
        """Delivers in any case: for messages whose number is bounded by what they speak of."""
        self._queue.put_nowait(message)

    def close(self) -> None:
        """Nothing to release."""
