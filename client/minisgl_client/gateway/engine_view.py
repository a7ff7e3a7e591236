"""GET /engine and GET /engine/stream: what the engine behind the server does at this moment.

    viewers ── snapshot, events ──► EngineView ──► Shared ── one question at a time ──► Backend.ask("engine") ──► Triton

However many look on, the server is asked at most once in `shared.KEPT_S`, also while it answers with errors, and nobody
is asked when nobody looks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec

from minisgl_client.gateway.errors import ApiError
from minisgl_client.gateway.shared import Shared

EVERY_S = 0.5
"""Between two events of a stream."""

UNREACHABLE = "unreachable"
"""The `state` in an event when the server tells nothing."""


class EngineView:
    """The last snapshot or error, for all who look on."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[Any]],
        is_ending: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """ask: the server; raises ApiError. is_ending: the gateway is to stop, and its streams with it."""
        self._ask = ask
        self._is_ending = is_ending
        self._wait = wait
        self._shared = Shared(self._fetch, clock)

    async def snapshot(self) -> bytes:
        """JSON, at most `shared.KEPT_S` old. Raises ApiError."""
        return await self._shared.answer()

    async def events(self) -> AsyncIterator[bytes]:
        """One every `EVERY_S`, until the gateway ends. When the server tells nothing the event says so."""
        while not self._is_ending():
            try:
                data = await self.snapshot()
            except ApiError as error:
                data = msgspec.json.encode({"state": UNREACHABLE, **error.body()})
            yield b"data: %b\n\n" % data
            await self._wait(EVERY_S)

    async def _fetch(self) -> bytes:
        return msgspec.json.encode(await self._ask())
