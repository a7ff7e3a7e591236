"""Processes that end with whoever started them, however that ends: the kernel's parent-death signal (Linux).

Where it stands in the flow: scheduler and workers ask for it themselves (actors/child.py); tritonserver and what tests
and benchmarks start get it from their starter. Loads the standard library alone: the drivers of other engines, which
run in environments of their own (load/peers), use it too.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded before any fork: between fork and exec little may be done


def signal_at_parents_end(number: signal.Signals) -> Callable[[], None]:
    """The `preexec_fn` of a process that is to get signal `number` when the *thread* that starts it has ended, which
    is why the main thread, or one that outlives the process, should start it.
    """

    def ask() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)

    return ask


def die_with(parent_pid: int) -> None:
    """Asks the kernel to kill this process when its parent, which is `parent_pid`, ends. Ends at once if it has."""
    signal_at_parents_end(signal.SIGKILL)()
    if os.getppid() != parent_pid:  # it ended before we asked
        os._exit(1)
