"""Whom a waiting sequence displaces under the setting `preempt`, and whether that is any use.

Where it stands in the flow: `planner.py` asks when the first of the queue does not fit, and retracts whom it is told.
"""

from __future__ import annotations

from minisgl_backend.scheduler.lives import Lives
from minisgl_backend.scheduler.running import all_youngest_first
from minisgl_backend.scheduler.sequence import SequenceState


class Preemption:
    """Decides only, and changes nothing."""

    def __init__(self, lives: Lives) -> None:
        self._lives = lives

    def victim_for(self, state: SequenceState, free_pages: int) -> SequenceState | None:
        """The next to give way to `state`: the youngest of those with the largest priority number above its own.

        None while something is on its way that may be enough, and when all of them together would not be enough.
        """
        lives = self._lives
        if lives.pages.quarantined_pages or lives.slots.quarantined_slots:
            return None
        lower = self._less_urgent(state)
        if not lower or not self._fits_without(lower, state, free_pages):
            return None
        return max(lower, key=_priority)  # the first of equals

    def _less_urgent(self, state: SequenceState) -> list[SequenceState]:
        """Youngest first. Never the oldest of all, which always goes on, nor whose last token is on its way."""
        lives = self._lives
        oldest = next(iter(lives.live.values()))
        return [
            running
            for running in all_youngest_first(lives.extending, lives.decoding)
            if running.priority > state.priority and running is not oldest and running.computed < running.stored_tokens
        ]

    def _fits_without(self, leaving: list[SequenceState], state: SequenceState, free_pages: int) -> bool:
        """Whether there would be pages for `state` if all these had gone; a slot is free as soon as one has."""
        lives, sharing = self._lives, self._lives.sharing
        if len(leaving) == lives.running:
            return True  # whoever would run alone was clipped to the pool
        locks = sharing.locks(leaving)
        evictable = lives.tree.evictable_pages + sharing.gives_up(leaving, locks)
        return lives.reserve.without(leaving).admits(state, sharing.peek_without(locks, state), free_pages, evictable)


def _priority(state: SequenceState) -> int:
    return state.priority
