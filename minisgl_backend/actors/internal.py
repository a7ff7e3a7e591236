"""Messages inside the engine host: what reaches the text actor besides the scheduler's Progress and Gauges.

They never cross a process, so they may hold live ends (an outlet). Frozen all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType, Protocol

from minisgl_backend.actors.mailbox import Outlet
from minisgl_backend.messages.client import Cancel, EngineState, Hello, Inspect, Request, ToHolder
from minisgl_backend.messages.engine import Gauges, Progress, TextToScheduler

HolderId = NewType("HolderId", bytes)
"""A connection to the host: a bridge, an `LLM`, an inspector."""


class Front(Protocol):
    """The way back to the holders."""

    def deliver(self, holder: HolderId, message: ToHolder) -> None:
        """Never waits. A holder that is gone or does not read loses its lease; nothing is raised."""
        ...


@dataclass(frozen=True, slots=True)
class FromHolder:
    """A holder's message."""

    holder: HolderId
    message: Hello | Request | Cancel | Inspect


@dataclass(frozen=True, slots=True)
class HolderGone:
    """A lease ended: everything of this holder is cancelled."""

    holder: HolderId


@dataclass(frozen=True, slots=True)
class EngineUp:
    """A group is ready."""

    to_scheduler: Outlet[TextToScheduler]
    pool_tokens: int
    pids: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class StateChanged:
    """The engine is not (or no longer) ready: every open request is answered UNAVAILABLE, except while STARTING."""

    state: EngineState
    detail: str


ToText = FromHolder | HolderGone | EngineUp | StateChanged | Progress | Gauges
