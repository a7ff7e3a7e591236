"""The scheduler: who runs next, and with which pages. Pure: no torch, clock, randomness or I/O.

Where it stands in the flow: the scheduler actor calls `add` and `abort` for messages of the text actor, sends each
`plan` to the workers and hands their result to `apply`; what the calls return goes back to the text actor.

    add ──► waiting ── plan admits ──► extending ── plan ──► decoding ── apply ──► ended
                                        prompt chunks         one token a step

The rules and their reasons are in docs/scheduler.md.
"""

from __future__ import annotations

from collections import deque

from minisgl_backend.cache.allocator import PageAllocator
from minisgl_backend.messages.engine import EndReason, Ended, Gauges, Progress, Sequence, Started
from minisgl_backend.messages.ids import SequenceId, StepId
from minisgl_backend.messages.plan import NO_TOKEN, Admission, BatchPlan, PageGrant, StepResult
from minisgl_backend.messages.tokens import count_tokens
from minisgl_backend.scheduler.admission import Reserve, WaitingQueue, clip_new_tokens
from minisgl_backend.scheduler.limits import Limits
from minisgl_backend.scheduler.release import Release
from minisgl_backend.scheduler.sequence import Phase, SequenceState
from minisgl_backend.scheduler.slots import SlotPool
from minisgl_backend.scheduler.step import StepDraft, StepInFlight

NOTHING = Progress((), (), ())


class Scheduler:
    """Continuous batching with chunked prompts under one token budget, first come, first served.

    `depth` is how many steps may be planned ahead of the one that runs: at 0 `plan` returns None until the step in
    flight was applied; at 1 the next step is planned meanwhile, its decode rows naming tokens that only the worker
    knows. Tokens that come out are the same.
    """

    def __init__(self, limits: Limits, depth: int = 0) -> None:
        self._limits = limits
        self._depth = depth
        self._pages = PageAllocator(limits.num_pages)
        self._slots = SlotPool(limits.max_running)
        self._reserve = Reserve()
        self._release = Release(self._pages, self._slots, self._reserve)
        self._live: dict[SequenceId, SequenceState] = {}  # all that have not ended, by arrival
        self._waiting = WaitingQueue()
        self._extending: dict[SequenceId, SequenceState] = {}  # by admission
        self._decoding: dict[SequenceId, SequenceState] = {}  # in the order in which their prompts were planned
        self._in_flight: deque[StepInFlight] = deque()
        self._arrivals = 0
        self._youngest_admitted = 0  # arrival
        self._steps = StepId(0)  # the last plan's number

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
        cut. A prompt that leaves no room for one token ends so at once. `now` (monotonic seconds) decides nothing
        while the order is by arrival.
        """
        prompt_tokens = count_tokens(sequence.prompt)
        assert prompt_tokens >= 1 and sequence.max_new_tokens >= 1, f"sequence {sequence.id} was not validated"
        assert sequence.id not in self._live, f"sequence id {sequence.id} is in use"
        max_new_tokens = clip_new_tokens(prompt_tokens, sequence.max_new_tokens, self._limits)
        if max_new_tokens < 1:
            return Progress((), (), (Ended(sequence.id, EndReason.LENGTH),))
        self._arrivals += 1
        state = SequenceState(sequence, max_new_tokens, self._limits.page_size, self._arrivals)
        self._live[state.id] = state
        self._waiting.push(state)
        return NOTHING

    def abort(self, id: SequenceId) -> Progress:
        """Ends a sequence in whatever phase. Empty for an unknown id, one that ended, and the second time.

        Rows of it in flight run on and their tokens are dropped; slot and pages are free when those steps were
        applied.
        """
        state = self._live.get(id)
        if state is None:
            return NOTHING
        return Progress((), (), (self._end(state, EndReason.ABORT),))

    def plan(self, now: float) -> BatchPlan | None:
        """The next step, or None: nothing can run before a result is applied or a sequence added.

        A plan once returned must be run: the counts advance here. Decode rows come first, then prompt chunks by
        arrival, in total at most `token_budget` tokens. `now` as in `add`.
        """
        if len(self._in_flight) > self._depth:
            return None
        draft = StepDraft(StepId(self._steps + 1))
        self._decode(draft)
        left = self._limits.token_budget - len(draft.row_slots)
        left = self._extend(draft, left)
        self._admit(draft, left, now)
        if not draft.row_slots:
            return None  # no number, and nothing was changed
        self._steps = draft.step
        plan, in_flight = draft.freeze()
        self._in_flight.append(in_flight)
        return plan

    def apply(self, result: StepResult) -> Progress:
        """Confirms the oldest step in flight: its tokens, the ends they bring, the pages that are free now.

        Tokens of sequences that ended since the step was planned are dropped. A row without a usable token ends its
        own sequence as FAILED. Results must come in step order, one token per sampling row.
        """
        step = self._in_flight.popleft()
        assert result.step == step.step, f"result of step {result.step}, expected {step.step}"
        assert len(result.tokens) == len(step.sampled), (
            f"step {step.step}: {len(result.tokens)} tokens for {len(step.sampled)} rows"
        )
        self._release.applied(step.step)
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
            if state.known == state.prompt_tokens:
                started.append(Started(state.id, 0, state.planned_s))
            state.known = known = state.known + 1
            if token in state.stop_token_ids:  # before the length: a stop token in the last place is a stop
                ended.append(self._end(state, EndReason.STOP))
            elif known == state.total_tokens:
                ended.append(self._end(state, EndReason.LENGTH))
        return Progress(tuple(ids), tuple(tokens), tuple(ended), tuple(started))

    def gauges(self) -> Gauges:
        return Gauges(
            waiting=len(self._waiting),
            running=len(self._extending) + len(self._decoding),
            free_slots=self._slots.free_slots,
            total_slots=self._limits.max_running,
            free_pages=self._pages.free_pages,
            total_pages=self._limits.num_pages,
            steps=self._steps,
        )

    def check_integrity(self) -> None:
        """Walks everything and raises AssertionError where two places disagree. Changes nothing."""
        running = [*self._extending.values(), *self._decoding.values()]
        self._pages.check(state.pages for state in running)
        self._slots.check(state.slot for state in running)
        self._waiting.check(self._youngest_admitted)
        assert len(self._live) == len(self._waiting) + len(running), "a sequence is listed twice or not at all"
        for id, state in self._live.items():
            assert id == state.id, f"sequence {state.id} is listed as {id}"
            state.check(self._limits.page_size)
        for phase, listed in ((Phase.EXTENDING, self._extending), (Phase.DECODING, self._decoding)):
            for state in listed.values():
                assert self._live.get(state.id) is state, f"sequence {state.id} ended, but is still listed"
                assert state.phase is phase, f"sequence {state.id} ({state.phase.value}) is listed as {phase.value}"
        promised = sum(state.need_pages - len(state.pages) for state in running)
        counted, free = self._reserve.promised_pages, self._pages.free_pages
        assert counted == promised, f"{counted} pages are counted as promised, {promised} are missing to the running"
        assert promised <= free, f"{promised} pages promised, {free} free"
        steps = [step.step for step in self._in_flight]
        assert steps == list(range(self._steps - len(steps) + 1, self._steps + 1)), f"steps in flight: {steps}"

    # ── the parts of a plan ──────────────────────────────────────────────────────────────────────────────────────

    def _decode(self, draft: StepDraft) -> None:
        """A row of one token for every decoding sequence. Inlined: this is the cost of a step."""
        step, slots, starts, sampled = draft.step, draft.row_slots, draft.row_starts, draft.sampled
        for state in self._decoding.values():
            start = state.computed
            if start == state.room_tokens:
                if start == state.stored_tokens:
                    continue  # all its tokens are planned; the last of them are in flight
                self._grant_one(draft, state)
            slots.append(state.slot)
            starts.append(start)
            sampled.append(state)
            state.computed = start + 1
            state.last_step = step
        draft.row_lengths = [1] * len(slots)
        draft.row_samples = [1] * len(slots)

    def _extend(self, draft: StepDraft, left: int) -> int:
        """Further chunks of the prompts that are under way. Returns what is left of the budget."""
        for state in tuple(self._extending.values()):
            if left == 0:
                break
            left -= self._chunk(draft, state, left)
        return left

    def _admit(self, draft: StepDraft, left: int, now: float) -> None:
        """First chunks of waiting sequences, while budget, slots and the reserve last."""
        while left > 0 and self._waiting and self._slots.free_slots:
            state = self._waiting.head()
            if not self._reserve.admits(state, self._pages.free_pages):
                break
            self._waiting.remove(state)
            self._reserve.promise(state)
            state.slot = self._slots.take()
            state.phase = Phase.EXTENDING
            state.planned_s = now
            self._extending[state.id] = state
            self._youngest_admitted = state.arrival
            draft.admissions.append(Admission(state.slot, state.prompt, state.sampling))
            left -= self._chunk(draft, state, left)

    def _chunk(self, draft: StepDraft, state: SequenceState, left: int) -> int:
        """Plans at most `left` more tokens of a prompt. Returns how many."""
        length = min(left, state.known - state.computed)
        missing_tokens = state.computed + length - state.room_tokens
        if missing_tokens > 0:
            self._grant(draft, state, -(-missing_tokens // self._limits.page_size))
        draft.chunk(state, length)
        if state.computed == state.known:
            del self._extending[state.id]
            state.phase = Phase.DECODING
            self._decoding[state.id] = state
        return length

    def _grant(self, draft: StepDraft, state: SequenceState, count: int) -> None:
        """Appends `count` of the pages promised to a sequence. They are there: see Reserve."""
        pages = self._pages.take(count)
        self._reserve.granted(count)
        state.append_pages(pages, self._limits.page_size)
        draft.grants.append(PageGrant(state.slot, tuple(pages)))

    def _grant_one(self, draft: StepDraft, state: SequenceState) -> None:
        """`_grant` of one page, in a third of the time: with pages of one token it is every row's."""
        page = self._pages.take_one()
        self._reserve.granted(1)
        state.append_page(page, self._limits.page_size)
        draft.grants.append(PageGrant(state.slot, (page,)))

    # ── the one way out ──────────────────────────────────────────────────────────────────────────────────────────

    def _end(self, state: SequenceState, reason: EndReason) -> Ended:
        """Takes everything from a live sequence and speaks its last word."""
        del self._live[state.id]
        if state.phase is Phase.WAITING:
            self._waiting.remove(state)
        else:
            del (self._extending if state.phase is Phase.EXTENDING else self._decoding)[state.id]
            self._release.running(state)
        state.phase = Phase.ENDED
        state.epoch += 1
        return Ended(state.id, reason)
