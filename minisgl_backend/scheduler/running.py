"""The sequences that hold a slot, oldest first.

Where it stands in the flow: `lives.py` keeps one of these for the extending and one for the decoding sequences. Rows
and pages are given in this order, and taken from its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import merge

from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.scheduler.sequence import SequenceState


class Running:
    """By arrival. Most enter in order, so it is sorted only after one that did not: a retracted one that resumed, or
    one whom another order than by arrival let overtake.
    """

    __slots__ = ("_last", "_sorted", "_states")

    def __init__(self) -> None:
        self._states: dict[SequenceId, SequenceState] = {}
        self._sorted = True
        self._last = 0  # arrival of the last one in the dict, or a later one that has left

    def __len__(self) -> int:
        return len(self._states)

    def add(self, state: SequenceState) -> None:
        if state.arrival < self._last:
            self._sorted = False
        else:
            self._last = state.arrival
        self._states[state.id] = state

    def remove(self, state: SequenceState) -> None:
        del self._states[state.id]

    def by_arrival(self) -> list[SequenceState]:
        """A copy: whoever walks it may meet some who have been let go meanwhile."""
        self._sort()
        return list(self._states.values())

    def oldest(self) -> SequenceState | None:
        self._sort()
        return next(iter(self._states.values()), None)

    def youngest_first(self) -> Iterator[SequenceState]:
        self._sort()
        return reversed(self._states.values())

    def _sort(self) -> None:
        if not self._sorted:
            states = sorted(self._states.values(), key=_arrival)
            self._states = {state.id: state for state in states}
            self._last = states[-1].arrival if states else 0
            self._sorted = True


def all_youngest_first(*groups: Running) -> Iterable[SequenceState]:
    """Over several groups."""
    return merge(*(group.youngest_first() for group in groups), key=_arrival, reverse=True)


def _arrival(state: SequenceState) -> int:
    return state.arrival
