"""tritonserver's log, read line by line: what to show, what the engine tells of its start, why a model failed.

A record begins with a letter and a date (`E1129 18:18:06.173441 8044 model_lifecycle.cc:642] "…"`); lines without
them belong to the record before.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable

_RECORD = re.compile(r'([IWEFV])\d{4} [\d:.]+ \d+ (\S+?):\d+\] "?(.*?)"?$')
_FAILED_MODEL = re.compile(r"failed to load '([^']*)' version \d+: (?:\w[\w ]*?: )?(?:TritonModelException: )?(.*)")
_ENGINE = "minisgl: "
_HARMLESS = (
    "Unable to allocate pinned system memory",
    "CudaDriverHelper has not been initialized",
    "DCGM unable to start",
)
_TOLD_BY_FAILURE = ("failed to load '", "ERROR: Failed to create instance")
_GAVE_UP = "failed to stop server:"
_LOST_A_LOCK = "boost::interprocess::lock_exception"
_KEPT_LINES = 60


class ServerLog:
    """Fed from one thread; `failure` and `tail` may be read when the server has ended."""

    def __init__(self, show: Callable[[str], None], engine: Callable[[str], None], *, verbose: bool) -> None:
        """show(line) gets what the operator must see; engine(line) each line the engine logs, without the prefix."""
        self._show = show
        self._engine = engine
        self._verbose = verbose
        self._tail: deque[str] = deque(maxlen=_KEPT_LINES)
        self._failures: list[str] = []
        self._showing = False
        self._gave_up = False

    def take(self, line: str) -> None:
        """One line, without its end."""
        self._tail.append(line)
        record = _RECORD.match(line)
        if record:
            self._showing = self._read(record[1], record[3])
        elif not self._verbose and line.startswith(("Error: Failed to initialize NVML", "error: creating server")):
            self._showing = False
        if self._verbose or self._showing:
            self._show(line)

    def failure(self) -> str | None:
        """One sentence: why the model could not be loaded. None when the log does not say."""
        return self._failures[0] if self._failures else None

    def gave_up(self) -> bool:
        """Whether the server could not end in time. It says that it exits, and then may hang."""
        return self._gave_up

    def lost_a_lock(self) -> bool:
        """Whether it ended in a fault of Triton's own, which one of some sixty starts on a busy machine shows: where
        models that start at once meet in shared memory, an exception of a lock is caught by nobody.
        """
        return any(_LOST_A_LOCK in line for line in self._tail)

    def tail(self) -> list[str]:
        """The last lines, whatever was shown of them."""
        return list(self._tail)

    def _read(self, level: str, text: str) -> bool:
        """Takes in one record; True when it is to be shown."""
        if failed := _FAILED_MODEL.match(text):
            reason = failed[2].split("\\n")[0].strip()
            if failed[1] == "minisgl":  # the others may fail because it does
                self._failures.insert(0, reason)
            else:
                self._failures.append(f"model {failed[1]!r}: {reason}")
        self._gave_up |= text.startswith(_GAVE_UP)
        if text.startswith(_ENGINE) and not self._verbose:
            self._engine(text.removeprefix(_ENGINE))
            return False
        return level in "WEF" and not text.startswith((*_HARMLESS, *_TOLD_BY_FAILURE))
