"""The server's process: read, stopped within bounds, and not left behind when we die."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

from minisgl_client.server.process import Interrupts, ServerProcess

GRACEFUL = (
    "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('up', flush=True); signal.pause()"
)
STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\nwhile True: signal.pause()"
)
DIES_WITH_CHILD = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.exit(1)
"""


class Running:
    """A server that has written its first line."""

    def __init__(self, code: str) -> None:
        self.lines: list[str] = []
        self._first = threading.Event()
        self.process = ServerProcess([sys.executable, "-c", code], os.environ, self._take)
        assert self._first.wait(60)

    def _take(self, line: str) -> None:
        self.lines.append(line)
        self._first.set()


def never() -> bool:
    return False


def has_ended(pid: int) -> bool:
    """No such process, or one that nobody has reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def await_end(pid: int) -> None:
    """Blocks on the process itself, for 60 s at most."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], 60)[0], f"process {pid} lives on"
    finally:
        os.close(descriptor)


def test_a_server_that_obeys_is_stopped_gracefully_and_its_log_was_read() -> None:
    server = Running(GRACEFUL)
    with Interrupts() as interrupts:
        assert server.process.stop(60, interrupts, never)
    assert server.process.exit_code() == 0
    assert server.lines == ["up"]


def test_a_server_that_does_not_obey_is_killed_when_patience_ends() -> None:
    server = Running(STUBBORN)
    with Interrupts() as interrupts:
        assert not server.process.stop(0.1, interrupts, never)
    assert server.process.exit_code() == -signal.SIGKILL


def test_a_signal_while_waiting_kills_at_once() -> None:
    server = Running(STUBBORN)
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        assert not server.process.stop(300, interrupts, never)
    assert interrupts.count == 1
    assert server.process.exit_code() == -signal.SIGKILL


def test_a_server_that_gave_up_and_hangs_is_killed_at_once() -> None:
    server = Running(STUBBORN)
    with Interrupts() as interrupts:
        assert not server.process.stop(300, interrupts, lambda: True)
    assert has_ended(server.process.pid)


def test_children_of_a_server_that_died_are_killed() -> None:
    server = Running(DIES_WITH_CHILD)
    with Interrupts() as interrupts:
        assert not server.process.stop(60, interrupts, never)
    await_end(int(server.lines[0]))


def test_a_server_does_not_outlive_a_killed_parent() -> None:
    program = f"""
import os, signal, sys
from minisgl_client.server.process import ServerProcess
server = ServerProcess([sys.executable, "-c", {GRACEFUL!r}], os.environ, lambda line: print(server.pid, flush=True))
signal.pause()
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent:
        server = int(parent.stdout.readline())
        assert not has_ended(server)
        parent.kill()
    await_end(server)


def test_signals_are_counted_and_each_wakes_the_waiter_once() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.wait(60)
        assert interrupts.wait(60)
        assert not interrupts.wait(0)
        assert interrupts.count == 2
    assert signal.getsignal(signal.SIGTERM) == before
