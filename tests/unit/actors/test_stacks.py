"""What a process tells of its stacks when it is asked from outside."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from minisgl_backend.actors.stacks import write_report

CHILD = """
import sys
from pathlib import Path
from minisgl_backend.actors.stacks import tell_stacks_on_signal

def was_there_before():
    print("before", flush=True)
    input()

def hangs_here():
    print("hangs", flush=True)
    input()

tell_stacks_on_signal(Path(sys.argv[1]), "worker-0")
was_there_before()
hangs_here()
"""


@pytest.fixture
def home() -> Iterator[Path]:
    home = Path(tempfile.mkdtemp(prefix="minisgl-", dir="/tmp"))
    yield home
    shutil.rmtree(home)


@pytest.fixture
def child(home: Path) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", CHILD, home], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"before\n"
    yield child
    child.kill()
    child.communicate()


async def test_a_report_tells_where_a_process_is_now_and_not_where_it_was_when_somebody_else_asked(
    home: Path, child: subprocess.Popen[bytes]
) -> None:
    await write_report(home / "first", ["somebody asked"], home, {"worker-0": child.pid})
    assert "was_there_before" in (home / "first").read_text()
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(b"\n")
    child.stdin.flush()
    assert child.stdout.readline() == b"hangs\n"
    await write_report(home / "second", ["it is late"], home, {"worker-0": child.pid})
    report = (home / "second").read_text()
    assert report.startswith(f"it is late\n\n── worker-0 (pid {child.pid})\n")
    assert "hangs_here" in report and "was_there_before" not in report


async def test_who_is_too_stuck_to_answer_is_named(home: Path, child: subprocess.Popen[bytes]) -> None:
    os.kill(child.pid, signal.SIGSTOP)
    await write_report(home / "report", ["it is late"], home, {"worker-0": child.pid, "worker-1": 2**22 + 1})
    told = (home / "report").read_text().split("── ")
    assert told[1] == f"worker-0 (pid {child.pid})\nit did not answer\n\n"
    assert told[2] == f"worker-1 (pid {2**22 + 1})\nit did not answer\n"
