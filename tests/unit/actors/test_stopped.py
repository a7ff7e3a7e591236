"""Who is stopped, by the kernel's word."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from minisgl_backend.actors import stopped
from minisgl_backend.actors.stopped import is_stopped, until_stopped


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """It says a line when it runs, and another one after each that it is given."""
    code = "import sys\nprint(flush=True)\nfor line in sys.stdin: print(flush=True)"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def _stop(pid: int) -> None:
    """Returns when the kernel has done it."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def test_only_a_stopped_process_is_found_stopped(process: subprocess.Popen[bytes]) -> None:
    assert not is_stopped(process.pid) and not is_stopped(os.getpid())
    _stop(process.pid)
    assert is_stopped(process.pid)
    os.kill(process.pid, signal.SIGCONT)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    process.stdout.readline()
    assert not is_stopped(process.pid)
    process.kill()
    process.wait()
    assert not is_stopped(process.pid)


async def test_a_stop_is_told_only_when_several_looks_in_a_row_have_found_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [True, True, True, False, True, True, True, True]
    looks = iter(seen)
    monkeypatch.setattr(stopped, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(stopped, "is_stopped", lambda pid: next(looks))
    await asyncio.wait_for(until_stopped(1), 60.0)
    assert next(looks, None) is None, "all looks were needed"
