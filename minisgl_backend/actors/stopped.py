"""Processes that are stopped (SIGSTOP, a forgotten debugger): a hang of which no pidfd and no socket tells.

Where it stands in the flow: the host looks at scheduler and workers, a link at its host, `minisgl serve` at Triton's
stubs. Whoever finds one stopped for too long kills it, and what follows is what follows any death. Linux says who is
stopped, so a process that is merely slow, or starved by others, is never taken for one.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

LOOK_EVERY_S = 0.25
LOOKS = 4
"""So many in a row must find the process stopped. They are counted, not timed: who was stopped together with what it
looks at (Ctrl-Z, a frozen container) finds it running soon after it runs again itself.
"""

PATIENCE_S = LOOK_EVERY_S * LOOKS
_PROC = Path("/proc")


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process, and none has continued it. False for one that is gone, or traced."""
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return False
    return stat[stat.rindex(b")") + 2 :].startswith(b"T")  # proc_pid_stat(5); the name before it may hold anything


async def until_stopped(pid: int) -> None:
    """Returns when the process has been stopped for PATIENCE_S. Never, for one that is gone: cancel it."""
    found = 0
    while found < LOOKS:
        await asyncio.sleep(LOOK_EVERY_S)
        found = found + 1 if is_stopped(pid) else 0
