"""One answer of the server for all who want it at about the same time, so that it is asked no more for any number of
them.

    callers ── answer ──► Shared ── one question at a time ──► Backend
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from minisgl_client.gateway.errors import ApiError

KEPT_S = 0.25

Answer = TypeVar("Answer")


class Shared(Generic[Answer]):
    """The last answer or error, and the question for the next one, which all who need it share."""

    def __init__(self, ask: Callable[[], Awaitable[Answer]], clock: Callable[[], float] = time.monotonic) -> None:
        """ask: the server; raises ApiError."""
        self._ask = ask
        self._clock = clock
        self._asking: asyncio.Task[Answer | ApiError] | None = None
        self._asked_s = -KEPT_S

    async def answer(self) -> Answer:
        """Asked at most `KEPT_S` ago. Raises ApiError."""
        if self._asking is None or (self._asking.done() and self._clock() >= self._asked_s + KEPT_S):
            self._asking = asyncio.create_task(self._fetch())
        told = await asyncio.shield(self._asking)  # who leaves leaves the others their answer
        if isinstance(told, ApiError):
            raise told.with_traceback(None)  # each who raises it adds to its traceback
        return told

    async def _fetch(self) -> Answer | ApiError:
        """An error is returned: everybody who waited may have left."""
        self._asked_s = self._clock()
        try:
            return await self._ask()
        except ApiError as error:
            return error
