"""Where the time of a start goes: stages, told apart by the lines that a worker says of its progress.

Where it stands in the flow: the supervisor notes each line of a group's start and ends the start's report with the
seconds of every stage; the command line shows the same lines under the same names. Loads nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_STAGE = "processes"
"""From the first moment of a start until the worker's first line: interpreters, imports, the handshake's sockets."""

_STAGES = (("importing torch", "torch"), ("loading weights", "weights"), ("KV pages", "warm up"))


def stage_of(line: str) -> str:
    """The stage that begins with a line of progress; empty when the line belongs to the present one."""
    return next((stage for words, stage in _STAGES if words in line), "")


class StartTimes:
    """The stages of one start. Seconds are of `clock`, the machine's monotonic clock, which all processes share."""

    def __init__(self, began_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = began_s
        self._stages = [(FIRST_STAGE, began_s)]

    def note(self, line: str) -> None:
        """A line of progress. A second line of the same stage begins nothing."""
        stage = stage_of(line)
        if stage and stage != self._stages[-1][0]:
            self._stages.append((stage, self._clock()))

    def report(self) -> str:
        """`started in 3.7 s (processes 0.8, torch 1.7, weights 0.2, warm up 1.0)`: until now."""
        now_s = self._clock()
        ends = [begin for _, begin in self._stages[1:]] + [now_s]
        parts = (f"{stage} {end - begin:.1f}" for (stage, begin), end in zip(self._stages, ends, strict=True))
        return f"started in {now_s - self._began_s:.1f} s ({', '.join(parts)})"
