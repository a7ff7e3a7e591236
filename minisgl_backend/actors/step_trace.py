"""A timeline of the steps, for Perfetto (ui.perfetto.dev): the setting `step_trace`.

    scheduler actor ── apply, plan, report ──►  one file  ◄── step ── worker actors

Chrome's trace format as a JSON array that is never closed: each process appends whole lines to the same file, so it
can be opened at any time, also after a kill. Times are of the monotonic clock, which all processes of a machine share.
How to read it is told in docs/performance.md.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from minisgl_backend.errors import ConfigError

SCHEDULER_TRACK = 0
FIRST_WORKER_TRACK = 1

_BUFFERED_EVENTS = 256
_LARGEST_BYTES = 128 << 20  # of one actor; what Perfetto still opens with ease
_log = logging.getLogger(__name__)


def begin_trace(file: str) -> Path | None:
    """Empties the file for a new engine; None when the setting is empty.

    Raises ConfigError: it can not be written.
    """
    if not file:
        return None
    try:
        Path(file).write_text("[\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"setting 'step_trace': {file} can not be written ({error.strerror})") from None
    return Path(file)


class StepTrace:
    """What one actor writes. Without a file it does nothing.

    Events are kept until there are many, `flush` is called, or the actor ends. A write that fails ends the trace with
    a line in the log, never the engine.
    """

    def __init__(self, file: Path | None, role: str, track: int) -> None:
        self._descriptor = -1
        self._spans: list[tuple[str, float, float, dict[str, int]]] = []  # not yet written: text is made all at once
        self._bytes = 0
        self._place = f'"pid":{os.getpid()},"tid":{track}'
        if file is None:
            return
        try:
            self._descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            _log.error("no step trace of %s: %s", role, error)
            return
        self._write(f'{{"name":"thread_name","ph":"M",{self._place},"args":{{"name":{json.dumps(role)}}}}},\n')

    def span(self, name: str, began_s: float, ended_s: float, **facts: int) -> None:
        """Something that took from `began_s` to `ended_s` (monotonic seconds)."""
        if self._descriptor < 0:
            return
        self._spans.append((name, began_s, ended_s, facts))
        if len(self._spans) >= _BUFFERED_EVENTS:
            self.flush()

    def flush(self) -> None:
        """Writes what is kept, in one piece, so that lines of several processes never mix."""
        if self._descriptor >= 0 and self._spans:
            self._write("".join(self._line(*span) for span in self._spans))
            self._spans.clear()

    def _line(self, name: str, began_s: float, ended_s: float, facts: dict[str, int]) -> str:
        times = f'"ts":{began_s * 1e6:.1f},"dur":{(ended_s - began_s) * 1e6:.1f}'
        return f'{{"name":"{name}","ph":"X",{self._place},{times},"args":{json.dumps(facts)}}},\n'

    def _write(self, text: str) -> None:
        piece = text.encode()
        self._bytes += len(piece)
        if self._bytes > _LARGEST_BYTES:
            return self._give_up(f"it has grown to {_LARGEST_BYTES >> 20} MiB")
        try:
            written = os.write(self._descriptor, piece)
        except OSError as error:
            return self._give_up(str(error))
        if written < len(piece):
            self._give_up("the disk is full")

    def close(self) -> None:
        """Idempotent."""
        self.flush()
        self._end()

    def _give_up(self, why: str) -> None:
        _log.error("the step trace ends: %s", why)
        self._end()

    def _end(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


NO_TRACE = StepTrace(None, "", 0)
