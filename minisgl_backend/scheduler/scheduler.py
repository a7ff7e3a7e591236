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

from minisgl_backend.messages.engine import Ended, EndReason, Gauges, Look, Progress, Sequence, Started, View
from minisgl_backend.messages.ids import SequenceId, StepId
from minisgl_backend.messages.plan import NO_TOKEN, BatchPlan, StepResult
from minisgl_backend.messages.tokens import count_tokens
from minisgl_backend.scheduler.admission import clip_new_tokens
from minisgl_backend.scheduler.caution import Caution
from minisgl_backend.scheduler.integrity import check_scheduler
from minisgl_backend.scheduler.limits import Limits
from minisgl_backend.scheduler.lives import Lives
from minisgl_backend.scheduler.pace import Pace
from minisgl_backend.scheduler.planner import Planner
from minisgl_backend.scheduler.release import Leaves
from minisgl_backend.scheduler.sequence import SequenceState
from minisgl_backend.scheduler.step import StepDraft, StepInFlight
from minisgl_backend.scheduler.view import StepTimes, view_of

NOTHING = Progress((), (), ())


class Scheduler:
    """Continuous batching with chunked prompts under one token budget, over pages that sequences share.

    `depth` is how many steps may be planned ahead of the one that runs: at 0 `plan` returns None until the step in
    flight was applied; at 1 the next step is planned meanwhile, its decode rows naming tokens that only the worker
    knows. Tokens that come out are the same.
    """

    def __init__(self, limits: Limits, depth: int = 0) -> None:
        self._limits = limits
        self._depth = depth
        self._lives = Lives(limits)
        self._live = self._lives.live
        self._caution = Caution(limits)
        self._pace = Pace(limits.target_itl_ms / 1000 or None, limits.page_size)
        self._planner = Planner(limits, self._lives, self._caution, self._pace)
        self._in_flight: deque[StepInFlight] = deque()
        self._arrivals = 0
        self._steps = StepId(0)  # the last plan's number
        self._applied_s = 0.0  # when the last result came
        self._times = StepTimes()

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
        known = count_tokens(sequence.prompt)
        validated = known > sequence.num_outputs and sequence.max_new_tokens >= 1
        assert validated, f"sequence {sequence.id} was not validated"
        assert sequence.id not in self._live, f"sequence id {sequence.id} is in use"
        max_new_tokens = clip_new_tokens(known, sequence.max_new_tokens, self._limits)
        if max_new_tokens < 1:
            return Progress((), (), (Ended(sequence.id, EndReason.LENGTH),))
        if sequence.deadline_s is not None and sequence.deadline_s <= now:
            return Progress((), (), (Ended(sequence.id, EndReason.DEADLINE),))
        self._arrivals += 1
        self._lives.add(SequenceState(sequence, max_new_tokens, self._limits.page_size, self._arrivals))
        return NOTHING

    def abort(self, id: SequenceId) -> Progress:
        """Ends a sequence in whatever phase. Empty for an unknown id, one that ended, and the second time.

        Rows of it in flight run on and their tokens are dropped; slot and pages are free when those steps were
        applied, but for pages that others share (rule 10).
        """
        state = self._live.get(id)
        if state is None:
            return NOTHING
        return Progress((), (), (self._lives.end(state, EndReason.ABORT),))

    def expire(self, now: float) -> Progress:
        """Ends all whose deadline is `now` or before, waiting or running. To be called before each `plan`."""
        late = self._lives.deadlines.expired(now)
        if not late:
            return NOTHING
        return Progress((), (), tuple(self._lives.end(self._live[id], EndReason.DEADLINE) for id in late))

    def plan(self, now: float) -> BatchPlan | None:
        """The next step, or None: nothing can run before a result is applied or a sequence added.

        A plan once returned must be run: the counts advance here (rule 1). Decode rows come first, oldest first, then
        prompt chunks by arrival, then those of the admitted (`priority`: both by urgency), in total at
        most `token_budget` tokens.
        """
        if len(self._in_flight) > self._depth:
            return None
        draft = StepDraft(StepId(self._steps + 1))
        self._planner.fill(draft, now)
        if not draft.row_slots:
            return None  # no number, and no step names anything
        self._steps = draft.step
        self._times.planned(draft.step, now)
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
        logprobs, prompt_logprobs = step.told(result) if result.logprobs or result.prompt_logprobs else ((), ())
        ids: list[SequenceId] = []
        tokens: list[int] = []
        ended: list[Ended] = []
        started: list[Started] = []
        for state, epoch, token in zip(step.sampled, step.epochs, result.tokens, strict=True):
            if state.epoch != epoch:
                continue
            if token == NO_TOKEN:
                ended.append(self._lives.end(state, EndReason.FAILED))
                continue
            ids.append(state.id)
            tokens.append(token)
            known = state.known
            if known == state.prompt_tokens:
                started.append(Started(state.id, state.cached_tokens, state.planned_s))
            state.known = known = known + 1
            state.fresh.append(token)
            if token in state.stop_token_ids:  # before the length: a stop token in the last place is a stop
                ended.append(self._lives.end(state, EndReason.STOP))
            elif known == state.total_tokens:
                ended.append(self._lives.end(state, EndReason.LENGTH))
            elif known == state.enter_at:  # after the end was looked for (rule 8)
                self._lives.sharing.enter_confirmed(state)
        return Progress(tuple(ids), tuple(tokens), tuple(ended), tuple(started), logprobs, prompt_logprobs)

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
            ended = (self._lives.end(alone, EndReason.FAILED),)
        for later in self._in_flight:
            later.void = True
        for state in (*self._lives.extending.by_arrival(), *self._lives.decoding.by_arrival()):
            self._lives.retract(state, Leaves.NOTHING)
        self._lives.sharing.reset()
        self._caution.failed()
        return Progress((), (), ended)

    def gauges(self) -> Gauges:
        lives, tree = self._lives, self._lives.tree
        return Gauges(
            waiting=len(lives.waiting),
            running=lives.running,
            free_slots=lives.slots.free_slots,
            total_slots=self._limits.max_running,
            free_pages=lives.pages.free_pages,
            total_pages=self._limits.num_pages,
            steps=self._steps,
            cached_pages=tree.total_pages,
            evictable_pages=tree.evictable_pages,
            matched_pages=lives.matched_pages,
            evicted_pages=tree.counts.evicted_pages,
            retractions=lives.retractions,
        )

    def view(self, look: Look, now: float) -> View:
        """What it holds now, for whoever looks on. Changes nothing."""
        return view_of(self._lives, self.gauges(), self._times, look, now)

    def check_integrity(self) -> None:
        """Walks everything and raises AssertionError where two places disagree. Changes nothing."""
        check_scheduler(self._lives)
        steps = [step.step for step in self._in_flight]
        assert steps == list(range(self._steps - len(steps) + 1, self._steps + 1)), f"steps in flight: {steps}"

    def _take_in_flight(self, number: StepId, now: float) -> StepInFlight:
        """The oldest step in flight, which is answered now: pages and slots it was the last to name come free."""
        step = self._in_flight.popleft()
        assert number == step.step, f"result of step {number}, expected {step.step}"
        self._lives.release.applied(number)
        begun_s = max(step.planned_s, self._applied_s)
        self._applied_s = now
        if not step.void:
            self._pace.observe(step.decode_rows, step.prompt_tokens, now - begun_s)
        return step
