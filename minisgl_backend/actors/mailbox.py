"""Mailboxes: the only way one actor reaches another.

An actor owns one `Inbox` and holds `Outlet`s to others. Two implementations of both: `LocalMailbox` within a process
(here) and `WireInbox`/`WireOutlet` between processes (actors/wire.py); an actor's code does not know which it has.

Every mailbox is bounded. What happens when one is full is chosen at the call: `send` waits, `put` refuses with
MailboxFull. Nothing is ever dropped silently.
"""

from __future__ import annotations

import asyncio
from typing import Generic, Protocol, TypeVar

M = TypeVar("M")
M_co = TypeVar("M_co", covariant=True)
M_contra = TypeVar("M_contra", contravariant=True)


class MailboxFull(Exception):
    """The receiver is far behind: at the bounds we choose, it is stuck."""


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
        """Raises MailboxFull instead of waiting."""
        ...

    def close(self) -> None: ...


class LocalMailbox(Generic[M]):
    """Both ends of a mailbox within one event loop."""

    def __init__(self, capacity: int) -> None:
        self._queue: asyncio.Queue[M] = asyncio.Queue(capacity)

    async def receive(self) -> M:
        return await self._queue.get()

    def receive_nowait(self) -> M | None:
        return self._queue.get_nowait() if not self._queue.empty() else None

    async def send(self, message: M) -> None:
        await self._queue.put(message)

    def put(self, message: M) -> None:
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            raise MailboxFull(f"{self._queue.maxsize} messages are waiting") from None

    def close(self) -> None:
        """Nothing to release."""
