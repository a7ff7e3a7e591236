"""The process of tritonserver: started so that it can not outlive us, read, and stopped within bounds.

It runs in a session of its own, so a Ctrl-C in the terminal reaches only us and we decide what it means; and the
kernel sends it SIGTERM when we die, however we die.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from types import FrameType, TracebackType
from typing import Any

from minisgl_backend.actors.parent_death import signal_at_parents_end


class Interrupts:
    """Counts SIGINT and SIGTERM while it is entered, instead of dying of them. Main thread only."""

    def __init__(self) -> None:
        self.count = 0
        self._arrived: SimpleQueue[None] = SimpleQueue()  # its put may interrupt its own get
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._count)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, timeout_s: float) -> bool:
        """Until the next signal, or for timeout_s. True when one came; each is reported once."""
        with contextlib.suppress(Empty):
            self._arrived.get(timeout=timeout_s)
            return True
        return False

    def _count(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self._arrived.put(None)


class ServerProcess:
    """A running tritonserver. `on_line` gets each line of its output, on a thread of ours."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], on_line: Callable[[str], None]) -> None:
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=signal_at_parents_end(signal.SIGTERM),
        )
        self._on_line = on_line
        self._reader = threading.Thread(target=self._read, name="tritonserver-log", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def stop(self, patience_s: float, interrupts: Interrupts, gave_up: Callable[[], bool]) -> bool:
        """Asks it to end, waits, then kills it and its children. True when it ended by itself and well.

        A signal while waiting means: at once, and so does `gave_up`. The log is read to its end.
        """
        self._wait(patience_s, interrupts, gave_up)
        with contextlib.suppress(ProcessLookupError):  # also when it ended: a stub may be left in its session
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self._reader.join(timeout=1.0)  # bounded: whoever left the session may still hold the pipe
        return code == 0

    def _wait(self, patience_s: float, interrupts: Interrupts, gave_up: Callable[[], bool]) -> None:
        """Steps of 0.05 s: a stop is rare, and what ends first (process, patience, a signal) is then plain to see."""
        if self._process.poll() is None:
            self._process.terminate()
        for _ in range(round(patience_s / 0.05)):
            if self._process.poll() is not None or gave_up() or interrupts.wait(0.05):
                return

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._on_line(line.rstrip("\n"))
