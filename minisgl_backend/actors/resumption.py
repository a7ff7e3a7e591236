"""Requests that outlive their engine group, and go on in the next one (the setting `resume_on_restart`).

Where it stands in the flow: owned by the text actor. When a group dies it keeps what is in work; when the next one is
ready they are handed over one after another, by urgency and arrival, each when the one before it got a token or ended:

    EngineDown ──► keep each ──► EngineUp ──► turn ── a token, an end ──► turn ── …

So when a group dies again, at most one of those that were kept had been handed over without getting a token since, and
it alone is suspected. Who was so at two deaths in a row is not tried again, and nobody else pays for it.
"""

from __future__ import annotations

from minisgl_backend.actors.open_request import OpenRequest
from minisgl_backend.messages.ids import SequenceId

_DEATHS = 2


class Resumption:
    """Holds entries of the text actor that are open."""

    def __init__(self) -> None:
        self._waiting: dict[SequenceId, OpenRequest] = {}  # kept, not handed over yet
        self._waited: dict[SequenceId, OpenRequest] = {}  # those of them that the last group never got
        self._trying: OpenRequest | None = None  # handed over, no token yet

    def begin(self) -> None:
        """A group died: `keep` follows for all that are open, by arrival."""
        self._waited, self._waiting, self._trying = self._waiting, {}, None

    def keep(self, entry: OpenRequest) -> bool:
        """False: the request is not tried again."""
        assert entry.memory is not None
        if entry.sequence not in self._waited:
            entry.memory.survive()
            if entry.memory.deaths >= _DEATHS:
                return False
        self.wait(entry)
        return True

    def wait(self, entry: OpenRequest) -> None:
        """Behind all others."""
        self._waiting[entry.sequence] = entry

    def is_waiting(self, entry: OpenRequest) -> bool:
        """No scheduler has it."""
        return entry.sequence in self._waiting

    def next(self) -> OpenRequest | None:
        """Whose turn it is, now in work; None: nobody's, or the one before has no token yet."""
        if self._trying is not None or not self._waiting:
            return None
        self._trying = min(self._waiting.values(), key=_urgency)  # of equals the first
        del self._waiting[self._trying.sequence]
        return self._trying

    def moved(self, entry: OpenRequest) -> None:
        """It got a token, or was closed."""
        self._waiting.pop(entry.sequence, None)
        if entry is self._trying:
            self._trying = None


def _urgency(entry: OpenRequest) -> int:
    """Smaller goes first. The same for all, unless the policy is `priority`."""
    assert entry.memory is not None
    return entry.memory.accepted.priority
