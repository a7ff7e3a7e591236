"""A person at a terminal: `minisgl` in a pty of its own, where Ctrl-C is a key."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from load.serving import eventually

CTRL_C, CTRL_D = "\x03", "\x04"
PATIENCE_S = 60.0


class Terminal:
    """What has been read so far is `text`; `read_until` goes on behind what the one before has found."""

    def __init__(self, process: subprocess.Popen[bytes], side: int) -> None:
        self.process = process
        self._side = side
        self._unread = ""
        self.text = ""

    def type(self, keys: str) -> None:
        """Once the program waits: a Ctrl-C that comes just before, Python's input() sees with the next key only."""
        self._once_it_waits()
        os.write(self._side, keys.encode())

    def signal(self, number: int) -> None:
        """Once the program waits, as `type`."""
        self._once_it_waits()
        self.process.send_signal(number)

    def read_until(self, wanted: str) -> str:
        """All up to and with it."""
        deadline = time.monotonic() + PATIENCE_S
        while wanted not in self._unread:
            assert self._read(deadline), f"{wanted!r} never came; the screen:\n{self.text}"
        found, _, self._unread = self._unread.partition(wanted)
        return found + wanted

    def end(self) -> int:
        """Reads to the end of the program; its exit code, negative for a signal."""
        deadline = time.monotonic() + PATIENCE_S
        while self._read(deadline):
            pass
        return self.process.wait(timeout=PATIENCE_S)

    def _once_it_waits(self) -> None:
        program = psutil.Process(self.process.pid)
        eventually(lambda: program.status() == psutil.STATUS_SLEEPING, PATIENCE_S, lambda: "it never waits")

    def _read(self, deadline: float) -> bool:
        """False at the end, or when the patience is."""
        if not select.select([self._side], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return False
        try:
            read = os.read(self._side, 65_536).decode(errors="replace")
        except OSError:  # EIO: nobody holds the other side
            return False
        self.text += read
        self._unread += read
        return bool(read)


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    """`minisgl ARGUMENTS` as the only program of a terminal; killed when it is still there at the end."""
    ours, its = pty.openpty()
    minisgl = str(Path(sys.executable).parent / "minisgl")
    environment = {**os.environ, "TERM": "dumb"}  # no colours, no bracketed paste
    command = ["setsid", "--ctty", minisgl, *arguments]
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environment, close_fds=True)
    os.close(its)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
