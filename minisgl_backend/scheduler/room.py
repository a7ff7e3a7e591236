"""Where the next pages come from while a step is planned.

Where it stands in the flow: `planner.py` begins a step here and asks for pages row by row, oldest sequences first.

    free ── else what the tree can give up ── else what is coming (a step in flight still names it): the row waits
         ── else (planner.py) what a younger sequence holds

A row that waits claims what it needs, so that no younger one takes it in its place, step after step.
"""

from __future__ import annotations

from minisgl_backend.cache.allocator import PageAllocator
from minisgl_backend.messages.ids import StepId
from minisgl_backend.scheduler.sequence import SequenceState
from minisgl_backend.scheduler.sharing import Sharing


class Room:
    """Plain attributes: the decode path reads two of them per page."""

    __slots__ = ("_kept_for", "_kept_is_there", "_pages", "_sharing", "claimed_pages", "stalled")

    def __init__(self, pages: PageAllocator, sharing: Sharing) -> None:
        self._pages = pages
        self._sharing = sharing
        self._kept_for: SequenceState | None = None
        self._kept_is_there = False
        self.claimed_pages = 0  # in this step, by rows that wait
        self.stalled = False  # a row waits, or somebody was retracted: nobody is admitted in this step (rule 13)

    def begin_step(self) -> None:
        self._kept_for = None
        self.claimed_pages = 0
        self.stalled = False

    def keep(self, state: SequenceState, is_there: bool) -> None:
        """Claims a page for a row that comes later in the step; `is_there`: and not only coming."""
        self._kept_for = state
        self._kept_is_there = is_there
        self.claimed_pages += 1

    def take_kept(self, state: SequenceState) -> bool:
        """The row is here for which a page was kept, or another one. Returns whether it may look for pages: not if
        its own is only coming. Its claim then stands, and nobody is retracted for it a second time.
        """
        if self._kept_for is not state:
            return True
        if self._kept_is_there:
            self._kept_for = None
            self.claimed_pages -= 1
        return self._kept_is_there

    def make(self, count: int, applied: StepId) -> bool:
        """Whether `count` pages are free beyond those claimed, evicting no more than is missing with what is coming."""
        pages = self._pages
        short = count + self.claimed_pages - pages.free_pages
        if short > pages.quarantined_pages:
            self._sharing.evict(short - pages.quarantined_pages, applied)
            short = count + self.claimed_pages - pages.free_pages
        return short <= 0

    def is_coming(self, count: int) -> bool:
        """Whether pages that steps in flight still name will be enough."""
        pages = self._pages
        return count + self.claimed_pages <= pages.free_pages + pages.quarantined_pages
