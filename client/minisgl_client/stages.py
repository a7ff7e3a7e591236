"""What the command line says of long work: each stage with its seconds, one line per event, on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO


class Stages:
    """One stage after another. `note` may be called from another thread: a line is one write."""

    def __init__(self, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out or sys.stderr
        self._clock = clock
        self._start_s = clock()
        self.current = ""
        self._stage_start_s = self._start_s
        self._seconds: dict[str, float] = {}

    def begin(self, stage: str, detail: str = "") -> None:
        """Ends the stage before, if any. Beginning the present stage again only notes the detail."""
        if stage != self.current:
            self.end()
            self.current, self._stage_start_s = stage, self._clock()
        self.note(detail)

    def note(self, detail: str) -> None:
        """A line under the present stage."""
        self._out.write(f"[{self._clock() - self._start_s:6.1f} s] {self.current:<9} {detail}".rstrip() + "\n")
        self._out.flush()

    def end(self) -> None:
        """Ends the present stage."""
        if self.current:
            self._seconds[self.current] = self._seconds.get(self.current, 0.0) + self._clock() - self._stage_start_s
        self.current = ""

    def summary(self) -> str:
        """`9.8 s (fetch 3.1, start 1.2, …)`: all time since the first line, and the stages that have ended."""
        parts = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in self._seconds.items())
        return f"{self._clock() - self._start_s:.1f} s ({parts})"
