"""An event loop whose clock jumps to the next timer: hours pass at once, and the same way each time."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class _Clock(selectors.SelectSelector):
    """Instead of waiting, time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everybody waits, and no timer will ever wake anybody"
        self.now_s += max(timeout, 0.0)
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For tasks that wait for each other and for timers only: no threads, no sockets."""

    def __init__(self) -> None:
        self._virtual = _Clock()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s

    def work(self, seconds: float) -> None:
        """The thread of the loop is busy for so long: timers that come due meanwhile are late."""
        self._virtual.now_s += seconds


def run_virtually(loop: VirtualTimeLoop, main: Any) -> Any:
    """Runs a coroutine to its end and closes the loop."""
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()
