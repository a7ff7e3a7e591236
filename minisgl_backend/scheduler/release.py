"""Who lets pages and slots go, and when they may be handed out again.

Where it stands in the flow: every way out of the running sequences (end token, length, abort, failure) passes
through `Release.running` exactly once. The worker is told nothing: a slot's table is dropped when the slot is given
to somebody else.
"""

from __future__ import annotations

from array import array

from minisgl_backend.cache.allocator import PageAllocator
from minisgl_backend.messages.ids import StepId
from minisgl_backend.scheduler.admission import Reserve
from minisgl_backend.scheduler.sequence import NO_SLOT, SequenceState
from minisgl_backend.scheduler.slots import SlotPool


class Release:
    """Gives back what a sequence holds, tagged with the last step that names it."""

    __slots__ = ("_pages", "_reserve", "_slots")

    def __init__(self, pages: PageAllocator, slots: SlotPool, reserve: Reserve) -> None:
        self._pages = pages
        self._slots = slots
        self._reserve = reserve

    def running(self, state: SequenceState) -> None:
        """Takes slot, pages and promise from a sequence that has a slot."""
        self._reserve.forgive(state)
        self._pages.release(state.pages, state.last_step)
        self._slots.release(state.slot, state.last_step)
        state.pages = array("i")
        state.slot = NO_SLOT

    def applied(self, step: StepId) -> None:
        """The result of `step` is here: what it was the last to name may be handed out."""
        self._pages.applied(step)
        self._slots.applied(step)
