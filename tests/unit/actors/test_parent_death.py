"""Processes that end with whoever started them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

_WAIT_S = 60

_STARTER = """
import signal, subprocess, sys
from minisgl_backend.actors.parent_death import signal_at_parents_end
before = signal_at_parents_end(signal.SIGTERM) if sys.argv[1] == "bound" else None
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], preexec_fn=before)
print(child.pid, flush=True)
child.wait()
"""

_CHILD = """
import sys
from minisgl_backend.actors.parent_death import die_with
die_with(int(sys.argv[1]))
print("here", flush=True)
"""


@pytest.mark.parametrize("bound", ["bound", "free"])
def test_a_process_ends_with_its_killed_starter_only_where_that_was_asked_for(bound: str) -> None:
    command = [sys.executable, "-P", "-c", _STARTER, bound]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pidfd = os.pidfd_open(int(starter.stdout.readline()))
        starter.kill()
    ended, _, _ = select.select([pidfd], [], [], _WAIT_S if bound == "bound" else 0)
    if not ended:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)
    assert bool(ended) == (bound == "bound")


def test_who_asks_after_its_parent_has_ended_ends_at_once() -> None:
    def child(parent: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-c", _CHILD, str(parent)]
        return subprocess.run(command, capture_output=True, text=True, timeout=_WAIT_S, check=False)

    assert (child(os.getpid()).returncode, child(os.getpid()).stdout) == (0, "here\n")
    assert (child(os.getpid() + 1).returncode, child(os.getpid() + 1).stdout) == (1, "")
