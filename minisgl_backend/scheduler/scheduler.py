"""The scheduler: who runs next, and with which pages. Pure: no torch, clock, randomness or I/O.

Where it stands in the flow: the scheduler actor calls `add` and `abort` for messages of the text actor, sends each
`plan` to the workers and hands their result to `apply`; what the calls return goes back to the text actor.

    add ──► waiting ── plan admits ──► extending ── plan ──► decoding ── apply ──► ended
               ▲                        prompt chunks         one token a step
               └─────────────── plan retracts ──┴───────────────┘

The rules and their reasons are in docs/scheduler.md; "rule n" below is one of those.
"""

from __future__ import annotations

from collections import deque

from minisgl_backend.cache.allocator import PageAllocator
from minisgl_backend.cache.radix import RadixCache
from minisgl_backend.messages.engine import Ended, EndReason, Gauges, Progress, Sequence, Started
from minisgl_backend.messages.ids import SequenceId, StepId
from minisgl_backend.messages.plan import NO_TOKEN, Admission, BatchPlan, PageGrant, StepResult
from minisgl_backend.messages.tokens import count_tokens
from minisgl_backend.scheduler.admission import Reserve, clip_new_tokens
from minisgl_backend.scheduler.caution import Caution
from minisgl_backend.scheduler.deadlines import Deadlines
from minisgl_backend.scheduler.integrity import check_scheduler
from minisgl_backend.scheduler.limits import Limits
from minisgl_backend.scheduler.order import make_order
from minisgl_backend.scheduler.pace import Pace
from minisgl_backend.scheduler.release import Leaves, Release
from minisgl_backend.scheduler.room import Room
from minisgl_backend.scheduler.running import Running, all_youngest_first
from minisgl_backend.scheduler.sequence import Phase, SequenceState
from minisgl_backend.scheduler.sharing import Sharing
from minisgl_backend.scheduler.slots import SlotPool
from minisgl_backend.scheduler.step import StepDraft, StepInFlight

NOTHING = Progress((), (), ())

_LEAVES = {EndReason.STOP: Leaves.CONFIRMED, EndReason.LENGTH: Leaves.CONFIRMED, EndReason.FAILED: Leaves.SUSPECT}


class Scheduler:
    """Continuous batching with chunked prompts under one token budget, over pages that sequences share.

    `depth` is how many steps may be planned ahead of the one that runs: at 0 `plan` returns None until the step in
    flight was applied; at 1 the next step is planned meanwhile, its decode rows naming tokens that only the worker
    knows. Tokens that come out are the same.
    """

    def __init__(self, limits: Limits, depth: int = 0) -> None:
        self._limits = limits
        self._page_size = limits.page_size
        self._depth = depth
        self._pages = PageAllocator(limits.num_pages)
        self._tree = RadixCache(limits.page_size)
        self._sharing = Sharing(self._pages, self._tree, limits.prefix_cache)
        self._slots = SlotPool(limits.max_running)
        self._reserve = Reserve(limits.reserve == "full", limits.page_size)
        self._release = Release(self._pages, self._slots, self._reserve, self._sharing)
        self._room = Room(self._pages, self._sharing)
        self._caution = Caution(limits)
        self._pace = Pace(limits.target_itl_ms / 1000 or None, limits.page_size)
        self._deadlines = Deadlines()
        self._live: dict[SequenceId, SequenceState] = {}  # all that have not ended, by arrival
        self._waiting = make_order(limits.policy, self._tree)
        self._extending = Running()
        self._decoding = Running()
        self._in_flight: deque[StepInFlight] = deque()
        self._arrivals = 0
        self._retractions = 0
        self._steps = StepId(0)  # the last plan's number
        self._applied_s = 0.0  # when the last result came

    # ── what the actor calls ─────────────────────────────────────────────────────────────────────────────────────

    @property
    def in_flight(self) -> bool:
        """Whether a step was planned and not yet applied."""
        return bool(self._in_flight)

    @property
    def has_work(self) -> bool:
        """Whether a sequence has not ended. When none is in flight, `plan` then returns a step."""
        return bool(self._live)

    def add(self, sequence: Sequence, now: float) -> Progress:
        """Queues a sequence; its id must not be in use by a live one.

        What context or pool can not hold of `max_new_tokens` is cut off, and the sequence ends as LENGTH where it was
        cut. A prompt that leaves no room for one token ends so at once (rule 16). `now`: monotonic seconds.
        """
        prompt_tokens = count_tokens(sequence.prompt)
        assert prompt_tokens >= 1 and sequence.max_new_tokens >= 1, f"sequence {sequence.id} was not validated"
        assert sequence.id not in self._live, f"sequence id {sequence.id} is in use"
        max_new_tokens = clip_new_tokens(prompt_tokens, sequence.max_new_tokens, self._limits)
        if max_new_tokens < 1:
            return Progress((), (), (Ended(sequence.id, EndReason.LENGTH),))
        if sequence.deadline_s is not None:
            if sequence.deadline_s <= now:
                return Progress((), (), (Ended(sequence.id, EndReason.DEADLINE),))
            self._deadlines.add(sequence.id, sequence.deadline_s)
        self._arrivals += 1
        state = SequenceState(sequence, max_new_tokens, self._page_size, self._arrivals)
        self._live[state.id] = state
        self._waiting.push(state)
        return NOTHING

    def abort(self, id: SequenceId) -> Progress:
        """Ends a sequence in whatever phase. Empty for an unknown id, one that ended, and the second time.

        Rows of it in flight run on and their tokens are dropped; slot and pages are free when those steps were
        applied, but for pages that others share (rule 10).
        """
        state = self._live.get(id)
        if state is None:
            return NOTHING
        return Progress((), (), (self._end(state, EndReason.ABORT),))

    def expire(self, now: float) -> Progress:
        """Ends all whose deadline is `now` or before, waiting or running. To be called before each `plan`."""
        late = self._deadlines.expired(now)
        if not late:
            return NOTHING
        return Progress((), (), tuple(self._end(self._live[id], EndReason.DEADLINE) for id in late))

    def plan(self, now: float) -> BatchPlan | None:
        """The next step, or None: nothing can run before a result is applied or a sequence added.

        A plan once returned must be run: the counts advance here (rule 1). Decode rows come first, oldest first, then
        prompt chunks by arrival, then those of the admitted, in total at most `token_budget` tokens.
        """
        if len(self._in_flight) > self._depth:
            return None
        draft = StepDraft(StepId(self._steps + 1))
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
        if not draft.row_slots:
            return None  # no number, and no step names anything
        self._steps = draft.step
        plan, in_flight = draft.freeze(now)
        self._in_flight.append(in_flight)
        return plan

    def apply(self, result: StepResult, now: float) -> Progress:
        """Confirms the oldest step in flight: its tokens, the ends they bring, the pages that are free now.

        Tokens of sequences that ended since the step was planned are dropped; those of retracted ones are kept. A row
        without a usable token ends its own sequence as FAILED. Results must come in step order, one token per sampling
        row. A result that says so goes to `fail`.
        """
        if result.failed:
            return self.fail(result.step, now)
        step = self._take_in_flight(result.step, now)
        if step.void:
            return NOTHING
        assert len(result.tokens) == len(step.sampled), (
            f"step {step.step}: {len(result.tokens)} tokens for {len(step.sampled)} rows"
        )
        self._caution.applied()
        ids: list[SequenceId] = []
        tokens: list[int] = []
        ended: list[Ended] = []
        started: list[Started] = []
        for state, epoch, token in zip(step.sampled, step.epochs, result.tokens, strict=True):
            if state.epoch != epoch:
                continue
            if token == NO_TOKEN:
                ended.append(self._end(state, EndReason.FAILED))
                continue
            ids.append(state.id)
            tokens.append(token)
            known = state.known
            if known == state.prompt_tokens:
                started.append(Started(state.id, state.cached_tokens, state.planned_s))
            state.known = known = known + 1
            state.fresh.append(token)
            if token in state.stop_token_ids:  # before the length: a stop token in the last place is a stop
                ended.append(self._end(state, EndReason.STOP))
            elif known == state.total_tokens:
                ended.append(self._end(state, EndReason.LENGTH))
            elif known == state.enter_at:  # after the end was looked for (rule 8)
                self._sharing.enter_page(state)
        return Progress(tuple(ids), tuple(tokens), tuple(ended), tuple(started))

    def fail(self, step: StepId, now: float) -> Progress:
        """The oldest step in flight has failed as a whole: memory ran out, or the device had an error (rule 4).

        What it should have written is not there, and others may have read it since: the steps planned after it are
        void, every running sequence is retracted, the tree is forgotten, and less is tried for a while. A sequence
        that had the only row ends as FAILED.
        """
        failed = self._take_in_flight(step, now)
        if failed.void:
            return NOTHING
        ended: tuple[Ended, ...] = ()
        alone = failed.alone
        if alone is not None and alone.epoch == failed.alone_epoch:
            ended = (self._end(alone, EndReason.FAILED),)
        for later in self._in_flight:
            later.void = True
        for state in (*self._extending.by_arrival(), *self._decoding.by_arrival()):
            self._retract(state, Leaves.NOTHING)
        self._sharing.reset()
        self._caution.failed()
        return Progress((), (), ended)

    def gauges(self) -> Gauges:
        counts = self._tree.counts
        return Gauges(
            waiting=len(self._waiting),
            running=len(self._extending) + len(self._decoding),
            free_slots=self._slots.free_slots,
            total_slots=self._limits.max_running,
            free_pages=self._pages.free_pages,
            total_pages=self._limits.num_pages,
            steps=self._steps,
            cached_pages=self._tree.total_pages,
            evictable_pages=self._tree.evictable_pages,
            matched_pages=counts.matched_pages,
            evicted_pages=counts.evicted_pages,
            retractions=self._retractions,
        )

    def check_integrity(self) -> None:
        """Walks everything and raises AssertionError where two places disagree. Changes nothing."""
        extending, decoding = self._extending.by_arrival(), self._decoding.by_arrival()
        check_scheduler(
            self._page_size, self._pages, self._slots, self._tree, self._reserve, self._live, extending, decoding
        )
        self._waiting.check()
        self._deadlines.check()
        waiting = len(self._live) - len(extending) - len(decoding)
        assert len(self._waiting) == waiting, f"{len(self._waiting)} in the queue, {waiting} are waiting"
        late = sum(state.deadline_s is not None for state in self._live.values())
        assert len(self._deadlines) == late, f"{len(self._deadlines)} deadlines are kept, {late} are to be met"
        steps = [step.step for step in self._in_flight]
        assert steps == list(range(self._steps - len(steps) + 1, self._steps + 1)), f"steps in flight: {steps}"

    # ── the parts of a plan ──────────────────────────────────────────────────────────────────────────────────────

    def _keep_for_oldest(self) -> None:
        """A page for the oldest, when it is extending: rows of younger ones come before it in the step.

        The oldest has a row at least every second step, and so ends; then the next one is the oldest (rules 3, 14).
        """
        oldest, decoding = self._extending.oldest(), self._decoding.oldest()
        if oldest is None or (decoding is not None and decoding.arrival < oldest.arrival):
            return
        if oldest.computed == oldest.room_tokens:
            self._make_room(1, oldest)
            self._room.keep(oldest)

    def _decode(self, draft: StepDraft) -> None:
        """A row of one token for every decoding sequence. Inlined: this is the cost of a step."""
        step, slots, starts, sampled = draft.step, draft.row_slots, draft.row_starts, draft.sampled
        pages, room, page_size = self._pages, self._room, self._page_size
        states = self._decoding.by_arrival()
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
        for state in self._extending.by_arrival():
            if left <= 0:
                return
            if state.phase is Phase.EXTENDING:  # not retracted for one of those before it
                left -= self._chunk(draft, state, left)
        self._admit(draft, left, now)

    def _admit(self, draft: StepDraft, left: int, now: float) -> None:
        """First chunks of waiting sequences, while budget, slots and the reserve last and no row had to wait."""
        room = self._room
        while left > 0 and not room.stalled:
            first = self._waiting.first()
            if first is None:
                break
            state = self._live[first.id]
            if state.last_step > self._release.applied_step:
                break  # a token of it is in flight (rule 2)
            if not self._fits(state):
                if self._limits.preempt and self._preempt_for(state):
                    continue
                break
            self._sharing.begin(state)  # locked before room is made, or that would evict it (rule 15)
            if not self._make_room(1, None):
                self._sharing.cancel(state)
                break
            self._waiting.take(state)
            state.refresh(self._page_size)
            state.slot = self._slots.take()
            state.phase = Phase.EXTENDING
            self._reserve.enter(state)
            self._extending.add(state)
            if state.cached_tokens < 0:
                state.cached_tokens, state.planned_s = state.computed, now
            draft.admissions.append(Admission(state.slot, state.tokens, state.sampling))
            left -= self._chunk(draft, state, left)

    def _fits(self, state: SequenceState) -> bool:
        """Whether a slot and the reserve allow it. Whoever would run alone always fits: it was clipped to the pool."""
        running = len(self._extending) + len(self._decoding)
        if not self._slots.free_slots or running >= self._caution.max_running:
            return False
        if not running:
            return True
        free = self._pages.free_pages - self._room.claimed_pages
        return self._reserve.admits(state, self._sharing.peek(state), free, self._tree.evictable_pages)

    def _chunk(self, draft: StepDraft, state: SequenceState, left: int) -> int:
        """Plans at most `left` more tokens of a prompt, fewer when pages are short. Returns how many."""
        page_size = self._page_size
        followed = self._sharing.follow(state)
        if followed:
            self._reserve.extended(followed)
        self._room.yield_kept(state)
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
                self._waiting.cached(state, state.tree_pages)
            if end == state.known:
                self._to_decoding(state)
        return length

    def _to_decoding(self, state: SequenceState) -> None:
        self._extending.remove(state)
        state.phase = Phase.DECODING
        self._decoding.add(state)
        if state.node is not None and state.tree_pages == state.known // self._page_size:
            state.enter_at = (state.tree_pages + 1) * self._page_size + 1

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
        for victim in all_youngest_first(self._extending, self._decoding):
            if victim.arrival <= taker.arrival:
                return False
            if victim.computed < victim.stored_tokens and self._sharing.frees_pages(victim):
                self._retract(victim, Leaves.PLANNED)
                return True
        return False

    def _preempt_for(self, state: SequenceState) -> bool:
        """Retracts the youngest of those with the largest priority number above that of `state`, never the oldest.

        Returns whether what it held is free at once and `state` is still the first.
        """
        if self._pages.quarantined_pages or self._slots.quarantined_slots:
            return False  # what is coming may be enough
        oldest = next(iter(self._live.values()))
        victim: SequenceState | None = None
        for running in all_youngest_first(self._extending, self._decoding):
            least = running.priority > (victim or state).priority
            if least and running is not oldest and running.computed < running.stored_tokens:
                victim = running
        if victim is None:
            return False
        self._retract(victim, Leaves.PLANNED)
        at_once = victim.last_step <= self._release.applied_step and self._waiting.first() is state
        self._room.stalled = not at_once
        return at_once

    def _retract(self, state: SequenceState, leaves: Leaves) -> None:
        """Back into the queue, by arrival. A token in flight is kept when it lands: the epoch stays (rule 2)."""
        (self._extending if state.phase is Phase.EXTENDING else self._decoding).remove(state)
        self._release.running(state, leaves)
        state.refresh(self._page_size)
        state.phase = Phase.WAITING
        self._waiting.push(state)
        self._room.stalled = True  # nobody is admitted in a plan that retracted
        self._retractions += 1
        if leaves is Leaves.PLANNED:
            self._reserve.estimate.retracted()

    # ── the one way out ──────────────────────────────────────────────────────────────────────────────────────────

    def _end(self, state: SequenceState, reason: EndReason) -> Ended:
        """Takes everything from a live sequence and speaks its last word."""
        del self._live[state.id]
        if state.deadline_s is not None:
            self._deadlines.remove(state.id)
        if state.phase is Phase.WAITING:
            self._waiting.remove(state)
        else:
            (self._extending if state.phase is Phase.EXTENDING else self._decoding).remove(state)
            self._release.running(state, _LEAVES.get(reason, Leaves.PLANNED))
        if reason is EndReason.STOP or reason is EndReason.LENGTH:
            self._reserve.estimate.ended(state.known - state.prompt_tokens, state.total_tokens - state.prompt_tokens)
        state.phase = Phase.ENDED
        state.epoch += 1
        return Ended(state.id, reason)

    def _take_in_flight(self, number: StepId, now: float) -> StepInFlight:
        """The oldest step in flight, which is answered now: pages and slots it was the last to name come free."""
        step = self._in_flight.popleft()
        assert number == step.step, f"result of step {number}, expected {step.step}"
        self._release.applied(number)
        begun_s = max(step.planned_s, self._applied_s)
        self._applied_s = now
        if not step.void:
            self._pace.observe(step.decode_rows, step.prompt_tokens, now - begun_s)
        return step
