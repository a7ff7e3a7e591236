"""Who lets pages and slots go, and when they may be handed out again.

Where it stands in the flow: every way out of the running sequences (end token, length, abort, deadline, failure,
retraction) passes through `Release.running` exactly once. The worker is told nothing: a slot's table is dropped when
the slot is given to somebody else.
"""

from __future__ import annotations

from enum import Enum

from minisgl_backend.cache.allocator import PageAllocator
from minisgl_backend.messages.ids import StepId
from minisgl_backend.scheduler.admission import Reserve
from minisgl_backend.scheduler.sequence import SequenceState
from minisgl_backend.scheduler.sharing import Sharing
from minisgl_backend.scheduler.slots import SlotPool


class Leaves(Enum):
    """What of a sequence's K/V others may use when it goes."""

    PLANNED = "planned"  # whatever known tokens a step has computed or will: it was aborted or retracted
    CONFIRMED = "confirmed"  # all but that of the token that ended it
    NOTHING = "nothing"  # what is in the tree stays there; its step has failed, and the tree will be reset
    SUSPECT = "suspect"  # its numbers were not finite: nobody finds again what it has read or put into the tree


class Release:
    """Gives back what a sequence holds, tagged with the last step that names it."""

    __slots__ = ("_pages", "_reserve", "_sharing", "_slots", "applied_step")

    def __init__(self, pages: PageAllocator, slots: SlotPool, reserve: Reserve, sharing: Sharing) -> None:
        self._pages = pages
        self._slots = slots
        self._reserve = reserve
        self._sharing = sharing
        self.applied_step = StepId(0)  # the last whose result is here

    def running(self, state: SequenceState, leaves: Leaves) -> None:
        """Takes slot, pages, lock and promise from a sequence that has a slot."""
        self._reserve.leave(state)
        if leaves is Leaves.SUSPECT:
            self._sharing.forget(state)
        else:
            self._sharing.leave(state, _usable_tokens(state, leaves))
        self._slots.release(state.slot, state.last_step)
        state.let_go()

    def applied(self, step: StepId) -> None:
        """The result of `step` is here: what it was the last to name may be handed out."""
        self.applied_step = step
        self._pages.applied(step)
        self._slots.applied(step)


def _usable_tokens(state: SequenceState, leaves: Leaves) -> int:
    """The last sampled token's K/V is not stored, unless a step was planned ahead. At an end that step is not counted,
    or two depths would cache different amounts.
    """
    if leaves is Leaves.NOTHING:
        return 0
    return min(state.computed, state.known - 1 if leaves is Leaves.CONFIRMED else state.known)
