"""What is in the next step: the rows, their pages, and who has to give way.

Where it stands in the flow: `Scheduler.plan` makes a StepDraft and has it filled here. The counts of the sequences
advance while rows are added, so a draft that has rows must be run.

    token budget   ├── one row of one token for each decoding sequence ──┼── chunks under way ──┼── first chunks ──┤
                     oldest first                                          oldest first           by the policy
                                                          `priority`:     └── the most urgent first of both ──┘

"Rule n" is one of docs/scheduler.md.
"""

from __future__ import annotations

from collections import Counter

from minisgl_backend.messages.plan import PageGrant
from minisgl_backend.scheduler.caution import Caution
from minisgl_backend.scheduler.limits import Limits
from minisgl_backend.scheduler.lives import Lives
from minisgl_backend.scheduler.order import FAIR_EVERY, Urgent, by_priority
from minisgl_backend.scheduler.pace import Pace
from minisgl_backend.scheduler.preemption import Preemption
from minisgl_backend.scheduler.release import Leaves
from minisgl_backend.scheduler.room import Room
from minisgl_backend.scheduler.running import all_youngest_first
from minisgl_backend.scheduler.sequence import Phase, SequenceState
from minisgl_backend.scheduler.step import StepDraft


class Planner:
    """Decides; what it decides is done by `lives`."""

    def __init__(self, limits: Limits, lives: Lives, caution: Caution, pace: Pace) -> None:
        self._limits = limits
        self._page_size = limits.page_size
        self._lives = lives
        self._pages = lives.pages
        self._sharing = lives.sharing
        self._reserve = lives.reserve
        self._release = lives.release
        self._room = Room(lives.pages, lives.sharing)
        self._urgent = lives.waiting if isinstance(lives.waiting, Urgent) else None
        self._preemption = Preemption(lives)
        self._caution = caution
        self._pace = pace

    def fill(self, draft: StepDraft, now: float) -> None:
        """Adds the rows of one step; none when nothing can run before a result is applied."""
        self._room.begin_step()
        self._keep_for_oldest()
        if self._limits.mixed:
            self._decode(draft)
            left = self._caution.token_budget - draft.decode_rows
            self._prefill(draft, self._pace.prompt_tokens(draft.decode_rows, left), now)
        else:
            self._prefill(draft, self._caution.token_budget, now)
            if not draft.row_slots:
                self._decode(draft)

    # ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _keep_for_oldest(self) -> None:
        """A page for the oldest, when it is extending: rows of younger ones come before it in the step.

        The oldest has a row at least every second step, and so ends; then the next one is the oldest (rules 3, 14).
        """
        oldest = self._lives.oldest_if_extending()
        if oldest is not None and oldest.computed == oldest.room_tokens:
            self._room.keep(oldest, self._make_room(1, oldest))

    def _decode(self, draft: StepDraft) -> None:
        """A row of one token for every decoding sequence. Inlined: this is the cost of a step."""
        step, slots, starts, sampled = draft.step, draft.row_slots, draft.row_starts, draft.sampled
        pages, room, page_size = self._pages, self._room, self._page_size
        states = self._lives.decoding.by_arrival()
        if pages.free_pages < len(states) + room.claimed_pages:
            self._evict_for(states)
        granted = 0
        for state in states:
            start = state.computed
            if start == state.room_tokens:
                if start == state.stored_tokens or state.slot < 0:
                    continue  # all its tokens are planned; or it was just retracted for one of those before it
                if pages.free_pages <= room.claimed_pages and not self._make_room(1, state):
                    room.claimed_pages += 1
                    continue
                page = pages.take_one()
                state.append_page(page, page_size)
                draft.grants.append(PageGrant(state.slot, (page,)))
                granted += 1
            slots.append(state.slot)
            starts.append(start)
            sampled.append(state)
            state.computed = start + 1
            state.last_step = step
        draft.decode_rows = rows = len(slots)
        draft.row_lengths = [1] * rows
        draft.row_samples = [1] * rows
        draft.last_state = sampled[-1] if rows else None
        self._reserve.decoded(rows, granted)

    def _prefill(self, draft: StepDraft, left: int, now: float) -> None:
        """Further chunks of the prompts that are under way, then first chunks of those that wait."""
        if self._urgent is not None:
            self._prefill_by_urgency(draft, left, now, self._urgent)
            return
        for state in self._lives.extending.by_arrival():
            if left <= 0:
                return
            if state.phase is Phase.EXTENDING:  # not retracted for one of those before it
                left -= self._chunk(draft, state, left)
        while left > 0 and (length := self._admit(draft, left, now)):
            left -= length

    def _prefill_by_urgency(self, draft: StepDraft, left: int, now: float, waiting: Urgent) -> None:
        """The more urgent first, whether under way or waiting. So several prompts may be under way.

        The oldest of the running has a row at least every second step all the same (rule 3): a part of the budget is
        kept for it when it had none in the last one.
        """
        oldest = self._lives.oldest_if_extending()
        kept = 0
        if oldest is not None and oldest.last_step < draft.step - 1:
            kept = min(left, max(self._page_size, left // FAIR_EVERY))
        for state in sorted(self._lives.extending.by_arrival(), key=by_priority):
            while left > kept and waiting.goes_before(state) and (length := self._admit(draft, left - kept, now)):
                left -= length
            if state is oldest:
                kept = 0
            if left > kept and state.phase is Phase.EXTENDING and state.last_step < draft.step:
                left -= self._chunk(draft, state, left - kept)  # not retracted for one before it, nor back since
        while left > 0 and (length := self._admit(draft, left, now)):
            left -= length

    def _admit(self, draft: StepDraft, left: int, now: float) -> int:
        """The first chunk of the first of the waiting, at most `left` tokens. Returns how many: none when nobody waits,
        slots or the reserve are used up, or a row had to wait.
        """
        lives = self._lives
        state = lives.waiting.first()
        if state is None or self._room.stalled:
            return 0
        if state.last_step > self._release.applied_step:
            return 0  # a token of it is in flight (rule 2)
        while not self._fits(state):
            if not self._limits.preempt or not self._preempt_for(state):
                return 0
        state.refresh(self._page_size)
        self._sharing.begin(state)  # locked before room is made, or that would evict it (rule 15)
        if not self._make_room(1, None):
            self._sharing.cancel(state)
            return 0
        lives.admit(state, now)
        draft.admit(state)
        return self._chunk(draft, state, left)

    def _fits(self, state: SequenceState) -> bool:
        """Whether a slot and the reserve allow it. Whoever would run alone always fits: it was clipped to the pool."""
        lives, running = self._lives, self._lives.running
        if not lives.slots.free_slots or running >= self._caution.max_running:
            return False
        if not running:
            return True
        free = self._pages.free_pages - self._room.claimed_pages
        return self._reserve.admits(state, self._sharing.peek(state), free, lives.tree.evictable_pages)

    def _chunk(self, draft: StepDraft, state: SequenceState, left: int) -> int:
        """Plans at most `left` more tokens of a prompt, fewer when pages are short. Returns how many."""
        page_size = self._page_size
        followed = self._sharing.follow(state)
        if followed:
            self._reserve.extended(followed)
        if not self._room.take_kept(state):
            return 0
        end = min(state.computed + left, state.known)
        if end > state.room_tokens:
            count = self._pages_for_chunk(state, -(-end // page_size) - len(state.pages))
            if count:
                state.append_pages(self._pages.take(count), page_size)
                self._reserve.extended(count)
            end = min(end, state.room_tokens)
        length = end - state.computed
        if length > 0:
            draft.chunk(state, end)
            if self._sharing.enter_prompt(state):
                self._lives.waiting.cached(state, state.tree_pages)
            if end == state.known:
                self._lives.promote(state)
        return length

    # ── room ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _pages_for_chunk(self, state: SequenceState, wanted: int) -> int:
        """How many pages a chunk gets now: all, else what there is, else one that a younger one gives."""
        if self._make_room(wanted, None):
            return wanted
        count = self._pages.free_pages - self._room.claimed_pages
        if count > 0:
            return min(count, wanted)
        if state.computed < state.room_tokens:
            return 0  # the page under way has places left
        if self._make_room(1, state):
            return 1
        self._room.claimed_pages += 1
        return 0

    def _evict_for(self, states: list[SequenceState]) -> None:
        """Evicts at once what the rows of `states` will need, and not page by page."""
        due = sum(state.computed == state.room_tokens < state.stored_tokens for state in states)
        if due:
            self._room.make(due, self._release.applied_step)

    def _make_room(self, count: int, taker: SequenceState | None) -> bool:
        """Whether `count` pages beyond the claimed ones are free now, after evicting and, for `taker`, retracting.

        What steps in flight will free is waited for, not taken from others in its stead (rule 13).
        """
        while not self._room.make(count, self._release.applied_step):
            if self._room.is_coming(count) or taker is None or not self._retract_for(taker):
                self._room.stalled = True
                return False
        return True

    def _retract_for(self, taker: SequenceState) -> bool:
        """Takes everything from the youngest running sequence, if it is younger than the one that asks (rule 14)."""
        if self._limits.reserve == "full":
            return False
        victim = self._victim_for(taker)
        if victim is None:
            return False
        self._retract(victim)
        self._reserve.estimate.retracted()
        return True

    def _victim_for(self, taker: SequenceState) -> SequenceState | None:
        """The youngest whose release frees a page; else the youngest of several that free one together: their locks all
        end at one node, and none has a page of its own.
        """
        younger: list[SequenceState] = []
        for victim in all_youngest_first(self._lives.extending, self._lives.decoding):
            if victim.arrival <= taker.arrival:
                break
            if victim.computed == victim.stored_tokens:
                continue  # its last token is on its way, and then its pages
            if self._sharing.frees_pages(victim):
                return victim
            younger.append(victim)
        nodes = Counter(victim.node for victim in younger)
        return next((one for one in younger if self._sharing.frees_pages(one, nodes[one.node])), None)

    def _preempt_for(self, state: SequenceState) -> bool:
        """Retracts who is least urgent, if `state` fits when all have gone that may have to go for it.

        Returns whether what it held is free at once and `state` is still the first.
        """
        victim = self._preemption.victim_for(state, self._pages.free_pages - self._room.claimed_pages)
        if victim is None:
            return False
        self._retract(victim)
        at_once = victim.last_step <= self._release.applied_step and self._lives.waiting.first() is state
        self._room.stalled = not at_once
        return at_once

    def _retract(self, victim: SequenceState) -> None:
        """Nobody is admitted in a step that retracted, or it would go to and fro."""
        self._lives.retract(victim, Leaves.PLANNED)
        self._room.stalled = True
