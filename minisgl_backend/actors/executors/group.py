"""What an executor gives: a running engine group (one scheduler, its workers), wherever they run.

An executor's `open` is an async context manager. Inside it the group is ready: every receiver has answered. When a
member dies, the body is cancelled and GroupDied comes out of the context manager; when the body leaves or is
cancelled, the group is stopped. Either way nothing of the group is left behind.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from minisgl_backend.actors.mailbox import Outlet
from minisgl_backend.messages.engine import SchedulerToText, TextToScheduler

Deliver = Callable[[SchedulerToText], Awaitable[None]]
Say = Callable[[str], None]


class GroupDied(Exception):
    """A member of the group ended. `fatal`: by a StartError, whose sentence and exit code these are."""

    def __init__(self, role: str, message: str, *, fatal: bool = False, exit_code: int = 1) -> None:
        super().__init__(f"{role}: {message}")
        self.fatal = fatal
        self.message = message
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Group:
    """A ready engine group."""

    to_scheduler: Outlet[TextToScheduler]
    num_pages: int  # KV pages the scheduler hands out
    pids: tuple[tuple[str, int], ...]  # of its processes; empty when inline
    placement: tuple[str, ...] = ()  # how its workers compute, a line each (device/placement.py)


class Executor(Protocol):
    """Starts groups. `generation` counts them; no two groups share a mailbox."""

    def open(self, generation: int, deliver: Deliver, say: Say) -> AbstractAsyncContextManager[Group]:
        """Messages of the scheduler go to `deliver`, progress lines to `say`. Raises GroupDied."""
        ...


def first_death(errors: BaseExceptionGroup[BaseException]) -> GroupDied | None:
    """Of the deaths noticed together the one that explains most: a fatal one, else the first.

    None when something else than deaths came out of the group's tasks: a fault of ours, to be raised as it is.
    """
    deaths: list[GroupDied] = []
    stack: list[BaseException] = [errors]
    while stack:
        error = stack.pop(0)
        if isinstance(error, BaseExceptionGroup):
            stack.extend(error.exceptions)
        elif isinstance(error, GroupDied):
            deaths.append(error)
        else:
            return None
    return next((died for died in deaths if died.fatal), deaths[0])
