"""Messages inside the engine host: what reaches the text actor besides the scheduler's Progress, Gauges and View.

They never cross a process, so they may hold live ends (an outlet). Frozen all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType, Protocol

from minisgl_backend.actors.mailbox import Outlet
from minisgl_backend.errors import RequestError
from minisgl_backend.messages.client import Cancel, EngineState, Hello, Inspect, Request, ToHolder
from minisgl_backend.messages.engine import Gauges, Progress, TextToScheduler, View
from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.text.parameters import SamplingParams
from minisgl_backend.text.request import Accepted
from minisgl_backend.text.tokenizer import Tokenizer

HolderId = NewType("HolderId", bytes)
"""A connection to the host: a bridge, an `LLM`, an inspector."""


class Front(Protocol):
    """The way back to the holders."""

    def deliver(self, holder: HolderId, message: ToHolder) -> None:
        """Never waits. A holder that is gone or does not read loses its lease; nothing is raised."""
        ...

    def give_up(self) -> None:
        """The engine is FAILED for good: it need not outlive its holders."""
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
    start: str = ""  # for the operator: placement of the workers, where the time of the start went


@dataclass(frozen=True, slots=True)
class EngineDown:
    """The group is no more: every open request is answered UNAVAILABLE, or kept for the next one."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the text actor needs of the model."""

    tokenizer: Tokenizer
    context_tokens: int
    defaults: SamplingParams  # where a request says nothing


@dataclass(frozen=True, slots=True)
class StateChanged:
    """RESTARTING and FAILED with their reason; STARTING with a line of progress, of the first start or a later one."""

    state: EngineState
    detail: str
    exit_code: int = 0  # of a StartError, when FAILED


@dataclass(frozen=True, slots=True)
class Tokenised:
    """A long prompt was tokenised in a thread, or an operation worked out: the bytes are its result."""

    sequence: SequenceId
    outcome: Accepted | bytes | RequestError


@dataclass(frozen=True, slots=True)
class Overdue:
    """The deadline of a request has passed that no scheduler may have."""

    sequence: SequenceId


ToText = (
    FromHolder
    | HolderGone
    | Loaded
    | Tokenised
    | Overdue
    | EngineUp
    | EngineDown
    | StateChanged
    | Progress
    | Gauges
    | View
)
