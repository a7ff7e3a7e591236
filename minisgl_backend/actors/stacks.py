"""What a hung process was doing: the stacks of its threads, which it writes when it gets SIGUSR1.

The handler is C (faulthandler), so it answers also from inside a computation, a lock or a driver's call. Where it
stands in the flow: children ask for it at their start, the host uses it before it ends a group whose step is late.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

_PATIENCE_S = 1.0
_LOOK_EVERY_S = 0.05


def tell_stacks_on_signal(home: Path, role: str) -> None:
    """From now on SIGUSR1 appends the stacks of all threads to a file in `home`."""
    file = _file(home, role).open("ab", buffering=0)  # for the life of the process: the handler knows its number
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)


async def write_report(report: Path, lines: Sequence[str], home: Path, pids: Mapping[str, int]) -> None:
    """Writes the lines, and the stacks of the processes (role → pid) that have asked for it, into `report`.

    Waits a second at most for those who are too stuck for it. What can not be written is left out.
    """
    before = {role: len(_told(home, role)) for role in pids}  # somebody else may have asked before
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    told: dict[str, bytes] = {}
    for _ in range(round(_PATIENCE_S / _LOOK_EVERY_S)):
        await asyncio.sleep(_LOOK_EVERY_S)
        last, told = told, {role: _told(home, role)[before[role] :] for role in pids}
        if all(told.values()) and told == last:  # and nobody is in the midst of it
            break
    parts = [*lines]
    for role, pid in pids.items():
        stacks = told[role].decode(errors="replace")
        parts += ["", f"── {role} (pid {pid})", stacks or "it did not answer"]
    _write(report, "\n".join(parts) + "\n")


def _write(report: Path, text: str) -> None:
    with contextlib.suppress(OSError):
        report.write_text(text, encoding="utf-8")


def _told(home: Path, role: str) -> bytes:
    try:
        return _file(home, role).read_bytes()
    except OSError:
        return b""


def _file(home: Path, role: str) -> Path:
    return home / f"stacks-{role}"
