"""Triton's Python stubs: the one part of a server that nobody starts again, and whose end clients do not notice.

A stub that dies, or is stopped, leaves its model READY and its clients waiting for ever (docs/triton.md). Where it
stands in the flow: `minisgl serve` looks from time to time, and when a stub of ours is lost it starts the server again.
Stubs of other models are their owners' affair: a neighbour that crashes again and again must not take us with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from minisgl_backend.actors.stopped import LOOKS, PATIENCE_S, state_of

_PROC = Path("/proc")
_STUB = b"triton_python_backend_stub"
_LOST = {"T": "was stopped by a signal", "Z": "died"}


class StubWatch:
    """Of one tritonserver that is ready. Its `look` is to be called every stopped.LOOK_EVERY_S."""

    def __init__(self, server_pid: int, is_loading: Callable[[str], bool]) -> None:
        """is_loading: whether the server says that the model of this name is not READY. Of the end of a stub that
        loads Triton tells by itself, a second or two later.
        """
        self._server_pid = server_pid
        self._is_loading = is_loading
        self._models: dict[int, str] = {}  # ours, by the pid of their stub
        self._found: dict[int, int] = {}  # looks in a row that found a process lost
        self._looks = 0
        self._list_stubs()  # now: of a dead one nobody can tell any more whose it was

    def look(self) -> str | None:
        """What is lost, once it has been for PATIENCE_S: the server itself (stopped), or a stub of ours."""
        self._looks += 1
        if self._looks % LOOKS == 0:
            self._list_stubs()
        if self._is_lost(self._server_pid, state_of(self._server_pid)[0], "T"):
            return f"tritonserver {_LOST['T']} {PATIENCE_S:g} s ago"
        for pid, model in self._models.items():
            state, _ = state_of(pid)
            if self._is_lost(pid, state, "TZ") and not (state == "Z" and self._is_loading(model)):
                return f"the stub of model {model!r} (pid {pid}) {_LOST[state]} {PATIENCE_S:g} s ago"
        return None

    def _is_lost(self, pid: int, state: str, letters: str) -> bool:
        """A model that is unloaded leaves a dead stub for a moment, too."""
        self._found[pid] = self._found.get(pid, 0) + 1 if state and state in letters else 0
        return self._found[pid] >= LOOKS

    def _list_stubs(self) -> None:
        """What is there now: models come and go, where Triton's model control lets them. The kernel's list of children
        may miss one, so those that are known stay until they are gone. A child that is none of ours is asked again:
        between fork and exec a stub still looks like its server.
        """
        known = {pid: model for pid, model in self._models.items() if state_of(pid)[1] == self._server_pid}
        others = (pid for pid in children_of(self._server_pid) if pid not in known)
        self._models = known | {pid: model for pid in others if (model := _model_of(pid))}
        there = {self._server_pid, *self._models}
        self._found = {pid: looks for pid, looks in self._found.items() if pid in there}


def children_of(pid: int) -> Sequence[int]:
    """Of all its threads, the dead ones that nobody has waited for included. Empty for a process that is gone."""
    found: list[int] = []
    for thread in (_PROC / str(pid) / "task").glob("*/children"):
        try:
            found += [int(child) for child in thread.read_text().split()]
        except OSError:  # a thread that has ended
            continue
    return found


def _model_of(pid: int) -> str:
    """The name of the model of ours that a stub runs; empty: of another's, or it is no stub."""
    try:
        command = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
        if len(command) < 2 or not command[0].endswith(_STUB):
            return ""
        file = Path(command[1].decode())  # REPOSITORY/MODEL/VERSION/model.py
        return file.parent.parent.name if b"minisgl_backend" in file.read_bytes() else ""
    except (OSError, UnicodeDecodeError):
        return ""
