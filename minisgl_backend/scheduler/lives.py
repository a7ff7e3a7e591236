"""Every sequence that has not ended, what it holds, and the moves from phase to phase.

Where it stands in the flow: `Scheduler` adds and ends sequences here, `planner.py` admits, promotes and retracts them.
Nobody else changes a phase.

    add ──► WAITING ── admit ──► EXTENDING ── promote ──► DECODING
               ▲                     │                        │
               └────── retract ──────┴────────────────────────┤
                                                              ▼
               any of the three ──────────── end ──────────► ENDED
"""

from __future__ import annotations

from minisgl_backend.cache.allocator import PageAllocator
from minisgl_backend.cache.radix import RadixCache
from minisgl_backend.messages.engine import Ended, EndReason
from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.scheduler.admission import Reserve
from minisgl_backend.scheduler.deadlines import Deadlines
from minisgl_backend.scheduler.limits import Limits
from minisgl_backend.scheduler.order import make_order
from minisgl_backend.scheduler.release import Leaves, Release
from minisgl_backend.scheduler.running import Running
from minisgl_backend.scheduler.sequence import Phase, SequenceState
from minisgl_backend.scheduler.sharing import Sharing
from minisgl_backend.scheduler.slots import SlotPool

_LEAVES = {EndReason.STOP: Leaves.CONFIRMED, EndReason.LENGTH: Leaves.CONFIRMED, EndReason.FAILED: Leaves.SUSPECT}


class Lives:
    """Owns the sequences and, through its parts, every slot and page. Its parts are read freely by the scheduler."""

    def __init__(self, limits: Limits) -> None:
        self.page_size = limits.page_size
        self.pages = PageAllocator(limits.num_pages)
        self.tree = RadixCache(limits.page_size)
        self.sharing = Sharing(self.pages, self.tree, limits.prefix_cache)
        self.slots = SlotPool(limits.max_running)
        self.reserve = Reserve(limits.reserve == "full", limits.page_size)
        self.release = Release(self.pages, self.slots, self.reserve, self.sharing)
        self.live: dict[SequenceId, SequenceState] = {}  # by arrival
        self.waiting = make_order(limits.policy, self.tree)
        self.extending = Running()
        self.decoding = Running()
        self.deadlines = Deadlines()
        self.retractions = 0
        self.matched_pages = 0  # found in the tree by those who were admitted
        self.prompt_tokens = self.hit_tokens = 0  # of prompts at their first admission, and what was found of them

    @property
    def running(self) -> int:
        """How many hold a slot."""
        return len(self.extending) + len(self.decoding)

    def oldest_if_extending(self) -> SequenceState | None:
        """The oldest of those who hold a slot, when its prompt is not planned to the end."""
        oldest, decoding = self.extending.oldest(), self.decoding.oldest()
        return None if oldest is None or (decoding is not None and decoding.arrival < oldest.arrival) else oldest

    def add(self, state: SequenceState) -> None:
        if state.deadline_s is not None:
            self.deadlines.add(state.id, state.deadline_s)
        self.live[state.id] = state
        self.waiting.push(state)

    def admit(self, state: SequenceState, now: float) -> None:
        """The first of the waiting gets a slot. The prefix it found is locked and in its table already."""
        self.waiting.take(state)
        state.slot = self.slots.take()
        state.phase = Phase.EXTENDING
        self.reserve.enter(state)
        self.extending.add(state)
        self.matched_pages += state.tree_pages
        if state.cached_tokens < 0:
            state.cached_tokens, state.planned_s = state.computed, now
            self.prompt_tokens += state.prompt_tokens
            self.hit_tokens += state.computed

    def promote(self, state: SequenceState) -> None:
        """All that an extending sequence knew is planned: from the next step on it has decode rows."""
        self.extending.remove(state)
        state.phase = Phase.DECODING
        self.decoding.add(state)
        self.sharing.expect_page(state)

    def retract(self, state: SequenceState, leaves: Leaves) -> None:
        """Back into the queue, by arrival. A token in flight is kept when it lands: the epoch stays (rule 2)."""
        self._group(state).remove(state)
        self.release.running(state, leaves)
        state.refresh(self.page_size)
        state.phase = Phase.WAITING
        self.waiting.push(state)
        self.retractions += 1

    def end(self, state: SequenceState, reason: EndReason) -> Ended:
        """Takes everything from a live sequence and speaks its last word."""
        del self.live[state.id]
        if state.deadline_s is not None:
            self.deadlines.remove(state.id)
        if state.phase is Phase.WAITING:
            self.waiting.remove(state)
        else:
            self._group(state).remove(state)
            self.release.running(state, _LEAVES.get(reason, Leaves.PLANNED))
        if reason is EndReason.STOP or reason is EndReason.LENGTH:
            self.reserve.estimate.ended(state.known - state.prompt_tokens, state.total_tokens - state.prompt_tokens)
        state.phase = Phase.ENDED
        state.epoch += 1
        return Ended(state.id, reason)

    def _group(self, state: SequenceState) -> Running:
        return self.extending if state.phase is Phase.EXTENDING else self.decoding
