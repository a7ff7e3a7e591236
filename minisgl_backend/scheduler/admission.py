"""Who may start: the clipping of what is asked, and the pages kept for those who run.

Where it stands in the flow: `Scheduler.add` clips; `planner.py` admits the first of the queue while the reserve allows
it, and `lives.py` tells the reserve who comes and goes.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy

from minisgl_backend.cache.radix import Peek
from minisgl_backend.scheduler.estimate import OutputEstimate
from minisgl_backend.scheduler.limits import Limits
from minisgl_backend.scheduler.sequence import Phase, SequenceState


def clip_new_tokens(prompt_tokens: int, max_new_tokens: int, limits: Limits) -> int:
    """New tokens that context and the empty pool allow, at most `max_new_tokens`; below 1 when there is no room.

    The last token's K/V is never stored, so the pool may be one token smaller than prompt + output.
    """
    return min(max_new_tokens, limits.context_tokens - prompt_tokens, limits.pool_tokens - prompt_tokens + 1)


class Reserve:
    """What the running sequences may still take, as counts; pages themselves are taken when their tokens are planned.

    `full`: the worst case, all the tokens that were asked for. A row then never lacks a page for long, and nobody is
    retracted. `learned`: the rest of what is to be extended, and of the new tokens the share that experience says.
    """

    __slots__ = ("_full", "_page_size", "estimate", "extend_pages", "new_tokens", "worst_pages")

    def __init__(self, full: bool, page_size: int) -> None:
        self._full = full
        self._page_size = page_size
        self.estimate = OutputEstimate()
        self.worst_pages = 0  # sum over running sequences of need_pages - pages held
        self.extend_pages = 0  # sum over extending ones of pages of what they know - pages held
        self.new_tokens = 0  # sum over running ones of the places that tokens still to be sampled may need

    def admits(self, state: SequenceState, found: Peek, free: int, evictable: int) -> bool:
        """Whether `state` fits beside those who run. What it finds in the tree it need not take, nor can be evicted."""
        room = free + evictable - found.unlocked_pages
        if self._full:
            return self.worst_pages + state.need_pages - found.pages <= room
        now = self.extend_pages + self._pages_of(state.known) - found.pages
        later = self.estimate.ratio * (self.new_tokens + state.stored_tokens - state.known) / self._page_size
        return now + later <= room

    def enter(self, state: SequenceState) -> None:
        """It is admitted, with the pages it found in its table."""
        held = len(state.pages)
        self.worst_pages += state.need_pages - held
        self.extend_pages += self._pages_of(state.known) - held
        self.new_tokens += state.stored_tokens - state.known

    def extended(self, pages: int) -> None:
        """An extending sequence got `pages` more."""
        self.worst_pages -= pages
        self.extend_pages -= pages

    def decoded(self, rows: int, pages: int) -> None:
        """`rows` decode rows were planned, for which `pages` pages were taken."""
        self.worst_pages -= pages
        self.new_tokens -= rows

    def leave(self, state: SequenceState) -> None:
        """A running sequence ends or is retracted: what it did not take is nobody's any more."""
        self.worst_pages -= self.worst_of(state)
        self.extend_pages -= self.extend_of(state)
        self.new_tokens -= self.new_of(state)

    def without(self, leaving: Iterable[SequenceState]) -> Reserve:
        """A copy as it were if these running sequences had left."""
        rest = copy(self)
        for state in leaving:
            rest.leave(state)
        return rest

    def worst_of(self, state: SequenceState) -> int:
        return state.need_pages - len(state.pages)

    def extend_of(self, state: SequenceState) -> int:
        return self._pages_of(state.known) - len(state.pages) if state.phase is Phase.EXTENDING else 0

    def new_of(self, state: SequenceState) -> int:
        return state.stored_tokens - max(state.computed, state.known_at_admission)

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self._page_size)

    def check(self, running: list[SequenceState], room: int) -> None:
        """Counts anew. `room`: pages that are free, in quarantine or evictable."""
        for name, counted, found in (
            ("worst case", self.worst_pages, sum(map(self.worst_of, running))),
            ("rest of prompts", self.extend_pages, sum(map(self.extend_of, running))),
            ("new tokens", self.new_tokens, sum(map(self.new_of, running))),
        ):
            assert counted == found, f"reserve: {counted} counted as {name}, {found} are missing to the running"
        if self._full:
            assert self.worst_pages <= room, f"{self.worst_pages} pages promised, {room} can be had"
