"""A scheduler and a fake worker wired together, and the books of what every sequence was told.

Where it stands in the flow: in place of text and scheduler actor. After every call the scheduler's integrity is
checked, and each answer is compared with the sequence's solo run.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field

from fakes.fake_worker import FakeWorker, solo_run
from minisgl_backend.messages.engine import EndReason, Progress, Sequence
from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.messages.plan import BatchPlan, StepResult
from minisgl_backend.messages.sampling import GREEDY, Sampling
from minisgl_backend.messages.tokens import count_tokens, pack_tokens, unpack_tokens
from minisgl_backend.scheduler.limits import Limits
from minisgl_backend.scheduler.order import FAIR_EVERY
from minisgl_backend.scheduler.scheduler import Scheduler
from minisgl_backend.scheduler.sequence import NO_SLOT

CUT_SHORT = (EndReason.ABORT, EndReason.DEADLINE)
"""Ends that may come at any time; after the others a sequence has had all that was due."""


@dataclass
class Life:
    """A sequence as its client sees it."""

    sequence: Sequence
    expected: list[int]
    reason: EndReason
    tokens: list[int] = field(default_factory=list)
    ended: EndReason | None = None
    cached_tokens: int | None = None  # told with its first token
    described: list[int] = field(default_factory=list)  # tokens whose logprobs were told
    described_prompt: dict[int, int] = field(default_factory=dict)  # position → token, likewise
    had_a_row: bool = False
    waited: int = 0  # before its first row: steps planned (fcfs), or admissions of others (the other policies)
    patience: int = 0  # at most so many

    @property
    def prompt(self) -> list[int]:
        return list(unpack_tokens(self.sequence.prompt))

    @property
    def most_steps(self) -> int:
        """Tokens it can bring or compute: no more steps than these are its own, in one life without retraction."""
        return count_tokens(self.sequence.prompt) + len(self.expected)


class SchedulerBench:
    """Every method checks what must always hold; `life` tells what a sequence was told so far.

    `now` is the time that the scheduler is told; a test moves it.
    """

    def __init__(self, limits: Limits, *, depth: int = 0, early_uploads: bool = False) -> None:
        self.limits = limits
        self.depth = depth
        self.scheduler = Scheduler(limits, depth)
        self.worker = FakeWorker(
            page_size=limits.page_size,
            num_pages=limits.num_pages,
            max_running=limits.max_running,
            token_budget=limits.token_budget,
            early_uploads=early_uploads,
        )
        self.now = 0.0
        self.lives: dict[SequenceId, Life] = {}  # by arrival
        self.steps = 0  # planned
        self.most_running = 0  # at any time
        self.retractions = 0
        self.sound = True  # False once a check has failed: what follows then says nothing
        self._in_flight: dict[int, int] = {}  # step → its rows
        self._failed: set[SequenceId] = set()  # sequences that were alone in a step that failed
        self._missed: tuple[SequenceId | None, int] = (None, 0)  # the oldest live sequence, plans without a row for it

    def add(
        self,
        prompt: Seq[int],
        max_new_tokens: int,
        *,
        stop_token_ids: tuple[int, ...] = (),
        sampling: Sampling = GREEDY,
        priority: int = 0,
        deadline_s: float | None = None,
        cache_salt: bytes = b"",
    ) -> SequenceId:
        """A new sequence; its id."""
        id = SequenceId(len(self.lives) + 1)
        sequence = Sequence(
            id, pack_tokens(prompt), sampling, max_new_tokens, stop_token_ids, priority, deadline_s, cache_salt
        )
        limits = self.limits
        room = min(
            max_new_tokens, limits.context_tokens - len(prompt), limits.num_pages * limits.page_size - len(prompt) + 1
        )
        expected, reason = solo_run(prompt, sampling, room, stop_token_ids) if room >= 1 else ([], "length")
        self.lives[id] = Life(sequence, expected, EndReason(reason), patience=self._patience())
        with self._checks():
            self._take(self.scheduler.add(sequence, self.now))
            ended = self.lives[id].ended
            late = deadline_s is not None and deadline_s <= self.now
            assert ended is None or room < 1 or late, f"only a prompt without room for a token ends at once, not {id}"
            assert room >= 1 or ended is not None, "a prompt that leaves no room for a token was queued"
        return id

    def abort(self, id: SequenceId) -> None:
        with self._checks():
            life = self.lives.get(id)
            was_live = life is not None and life.ended is None
            progress = self.scheduler.abort(id)
            assert bool(progress.ended) == was_live, f"abort of {id} answered {progress}, live before: {was_live}"
            self._take(progress)
            assert life is None or not was_live or life.ended is EndReason.ABORT

    def plan(self) -> BatchPlan | None:
        """Plans a step and submits it."""
        with self._checks():
            late = self.scheduler.expire(self.now)
            if late.ended:  # else nothing has changed since everything was looked at
                self._take(late)
            running = [state.id for state in self.scheduler._live.values() if state.slot != NO_SLOT]
            plan = self.scheduler.plan(self.now)
            self.scheduler.check_integrity()
            self._note_retractions(running)
            if plan is None:
                waits = self._in_flight or not self.scheduler.has_work
                assert waits, "nothing runs, nothing is planned, and sequences wait"
                return None
            assert len(self._in_flight) <= self.depth, "planned further ahead than allowed"
            self._in_flight[plan.step] = len(plan.row_slots)
            self.worker.submit(plan)
            self._check_tables()
            self._count(plan)
            self._check_oldest(plan)
            return plan

    def apply(self) -> Progress:
        """Runs the oldest step in flight and applies its result."""
        return self.apply_result(self.worker.run())

    def fail(self) -> Progress:
        """The oldest step in flight comes to nothing, and what it wrote is nonsense."""
        for life in self.lives.values():  # all of them begin again
            life.patience += self._patience()
        return self.apply_result(self.worker.fail())

    def apply_result(self, result: StepResult) -> Progress:
        with self._checks():
            rows = self._in_flight.pop(result.step)
            progress = self.scheduler.apply(result, self.now)
            self.worker.applied(result.step)
            if result.failed:
                assert not progress.tokens, "tokens of a step that failed"
                assert len(progress.ended) <= (rows == 1), "only who is alone in a failed step fails with it"
                self._failed.update(ended.id for ended in progress.ended)
            self._take(progress)
            return progress

    def step(self) -> Progress:
        """One step from plan to apply; there must be something to run."""
        assert self.plan() is not None, "nothing to run"
        return self.apply()

    def row_lengths(self, steps: int) -> list[tuple[int, ...]]:
        """Of each of the next `steps` steps."""
        lengths = []
        for _ in range(steps):
            plan = self.plan()
            assert plan is not None, "nothing to run"
            lengths.append(plan.row_lengths)
            self.apply()
        return lengths

    def finish(self) -> None:
        """Runs until every sequence has ended and every step is applied; then everything must be free or cached.

        The bound is a proof that nobody waits for ever: the oldest has a row at least every second step, and an
        oldest one is never retracted, so it ends within twice its tokens; then the next one is the oldest.
        """
        open_lives = [life for life in self.lives.values() if life.ended is None]
        bound = 2 * sum(life.most_steps + 2 for life in open_lives) + 3
        if self.limits.policy != "fcfs":  # an older one may come in late, and then takes pages from the one before
            bound *= 1 + len(open_lives)
        start = self.steps
        while (plan := self.plan()) is not None or self._in_flight:
            if plan is None:
                self.apply()
            assert self.steps - start <= bound, f"still at work after {bound} steps"
        assert not self.scheduler.has_work and not self.scheduler.in_flight
        self._check_all_came_back()
        for id in self.lives:
            self._check_told(id)

    def life(self, id: SequenceId) -> Life:
        return self.lives[id]

    @contextmanager
    def _checks(self) -> Iterator[None]:
        self.sound = False
        yield
        self.sound = True

    def _patience(self) -> int:
        """How long a sequence that comes now may have to wait for its first row, whatever comes after it.

        First come, first served: each older one has a row at least every second step once it is the oldest, and is not
        retracted then. Other policies let others pass, but of FAIR_EVERY admissions one is the oldest's.
        """
        older = [life for life in self.lives.values() if life.ended is None]
        if self.limits.policy == "fcfs":
            return 2 * sum(life.most_steps + 1 for life in older) + 2
        return FAIR_EVERY * (1 + sum(not life.had_a_row for life in older) + len(older))

    def _note_retractions(self, running: list[SequenceId]) -> None:
        """Who of those that were `running` holds no slot now. A plan may retract and then have no rows."""
        live = self.scheduler._live
        retracted = [id for id in running if live[id].slot == NO_SLOT]
        self.retractions += len(retracted)
        if retracted and not self.limits.preempt:
            assert min(running) not in retracted, f"sequence {min(running)}, the oldest that ran, was retracted"
        if self.limits.policy != "fcfs":
            for id, life in self.lives.items():
                life.patience += FAIR_EVERY * sum(one < id for one in retracted)

    def _count(self, plan: BatchPlan) -> None:
        """Who has waited how long, and how many run."""
        self.steps += 1
        self.most_running = max(self.most_running, self.scheduler.gauges().running)
        rows = set(plan.row_slots)
        for id, state in self.scheduler._live.items():
            life = self.lives[id]
            life.had_a_row |= state.slot in rows
            if not life.had_a_row:
                life.waited += 1 if self.limits.policy == "fcfs" else len(plan.admissions)
                assert life.waited <= life.patience, f"sequence {id} has waited for {life.waited}"

    def _check_oldest(self, plan: BatchPlan) -> None:
        """Nobody starves: the oldest sequence has a row at least every second step. With other policies than by arrival
        that is the oldest of those who run. (Without mixed batches, prompts stop the others: that is their price.)"""
        limits, live = self.limits, self.scheduler._live.values()
        if not limits.mixed or limits.preempt:
            return
        oldest = next((state for state in live if state.slot != NO_SLOT or limits.policy == "fcfs"), None)
        if oldest is None:
            return
        missed = 0 if oldest.slot in plan.row_slots else 1 + (self._missed[1] if self._missed[0] == oldest.id else 0)
        self._missed = (oldest.id, missed)
        assert missed < 2, f"sequence {oldest.id}, the oldest, had no row in two steps"

    def _check_tables(self) -> None:
        """The worker reads by the tables that the scheduler counts with: nothing in them is ever exchanged."""
        for state in self.scheduler._live.values():
            if state.slot != NO_SLOT and state.told_pages:
                table, told = self.worker.table(state.slot), list(state.pages[: state.told_pages])
                assert table == told, f"sequence {state.id}: the worker's table is {table}, the scheduler's {told}"

    def _check_all_came_back(self) -> None:
        limits, gauges = self.limits, self.scheduler.gauges()
        assert (gauges.waiting, gauges.running, gauges.free_slots) == (0, 0, limits.max_running), f"{gauges}"
        cached, free = gauges.cached_pages, gauges.free_pages
        assert free + cached == limits.num_pages, f"not every page came back: {gauges}"
        assert gauges.evictable_pages == cached, f"{cached - gauges.evictable_pages} pages are locked by nobody"
        assert limits.prefix_cache or not cached, f"{cached} pages are cached without a cache"

    def _take(self, progress: Progress) -> None:
        assert len(progress.sequence_ids) == len(progress.tokens)
        for id, token in zip(progress.sequence_ids, progress.tokens, strict=True):
            assert self.lives[id].ended is None, f"a token for sequence {id} after its end"
            self.lives[id].tokens.append(token)
        for started in progress.started:
            life = self.lives[started.id]
            assert life.cached_tokens is None, f"sequence {started.id} started twice"
            assert started.id in progress.sequence_ids and len(life.tokens) == 1, "told with the first token"
            assert 0 <= started.cached_tokens < count_tokens(life.sequence.prompt), f"{started.cached_tokens} cached"
            life.cached_tokens = started.cached_tokens
        self._take_logprobs(progress)
        for ended in progress.ended:
            assert self.lives[ended.id].ended is None, f"sequence {ended.id} ended twice"
            self.lives[ended.id].ended = ended.reason
            self._check_told(ended.id)
        for id in progress.sequence_ids:
            assert self.lives[id].cached_tokens is not None, f"sequence {id} has a token, but never started"
            self._check_told(id)
        self.scheduler.check_integrity()

    def _take_logprobs(self, progress: Progress) -> None:
        """Of each token exactly once, in order; of a prompt maybe again, but never something else."""
        for told in progress.prompt_logprobs:
            life = self.lives[told.id]
            assert life.sequence.sampling.prompt_logprobs >= 0 and life.ended is None, f"{told}: nobody asked"
            for place, token in enumerate(unpack_tokens(told.logprobs.ids), told.logprobs.position):
                life.described_prompt[place] = token
        asking = [id for id in progress.sequence_ids if self.lives[id].sequence.sampling.logprobs >= 0]
        assert [told.id for told in progress.logprobs] == asking, (
            "logprobs of the tokens in the columns, in their order"
        )
        for told in progress.logprobs:
            life = self.lives[told.id]
            life.described += unpack_tokens(told.logprobs.ids)
            assert told.logprobs.position == len(life.prompt) + len(life.described) - 1, f"{told}"

    def _check_logprobs(self, life: Life) -> None:
        """What was told of tokens and prompt is of those tokens, and complete."""
        sampling = life.sequence.sampling
        assert life.described == (life.tokens if sampling.logprobs >= 0 else [])
        if life.tokens and sampling.prompt_logprobs >= 0:
            assert life.described_prompt == dict(list(enumerate(life.prompt))[1:]), "before the first token all of it"
        if sampling.prompt_logprobs >= 0:
            assert not life.cached_tokens, "its prompt was read from the cache"

    def _check_told(self, id: SequenceId) -> None:
        """What was told is a prefix of the solo run, and all of it when the sequence was let to its end."""
        life = self.lives[id]
        told = f"sequence {id} (prompt {life.prompt})"
        assert life.tokens == life.expected[: len(life.tokens)], f"{told}: {life.tokens}, alone {life.expected}"
        self._check_logprobs(life)
        if life.ended is EndReason.DEADLINE:
            deadline_s = life.sequence.deadline_s
            assert deadline_s is not None and deadline_s <= self.now, f"{told} ended too early, at {self.now}"
        if life.ended is EndReason.FAILED and id in self._failed:
            return
        if life.ended is not None and life.ended not in CUT_SHORT:
            assert (life.tokens, life.ended) == (life.expected, life.reason), f"{told} ended as {life.ended}"
