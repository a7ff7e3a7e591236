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


def state_of(pid: int) -> tuple[str, int]:
    """The kernel's letter for it (proc_pid_stat(5)): T for one that a signal has stopped, Z for one that is dead and
    whose parent does not care; and its parent's pid. Empty and 0: it is gone.
    """
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return "", 0
    state, parent = stat[stat.rindex(b")") + 2 :].split(maxsplit=2)[:2]  # the name before them may hold anything
    return state.decode(), int(parent)


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process, and none has continued it. False for one that is gone, or traced."""
    return state_of(pid)[0] == "T"


async def until_stopped(pid: int) -> None:
    """Returns when the process has been stopped for PATIENCE_S. Never, for one that is gone: cancel it."""
    found = 0
    while found < LOOKS:
        await asyncio.sleep(LOOK_EVERY_S)
        found = found + 1 if is_stopped(pid) else 0
