"""Scheduler actor and worker actor alone in one loop, over the worker that is exact to the page.

The actors and their mailboxes are the real ones. The scheduler is the real one, watched: each plan that leaves it is
checked by the fake worker against all that is not yet applied. The test is the text actor.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from fakes.fake_worker import FakeWorker, solo_run
from minisgl_backend.actors.mailbox import LocalMailbox
from minisgl_backend.actors.scheduler import SchedulerActor, ToScheduler
from minisgl_backend.actors.worker import ToWorker, WorkerActor
from minisgl_backend.messages.engine import Abort, EndReason, Gauges, Progress, SchedulerToText, Sequence
from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.messages.plan import BatchPlan, StepResult
from minisgl_backend.messages.tokens import unpack_tokens
from minisgl_backend.scheduler.limits import Limits
from minisgl_backend.scheduler.scheduler import Scheduler

Device = Callable[[], Awaitable[bool]]
"""Waits as long as a step takes, and says whether the step goes well."""


class _WatchedScheduler(Scheduler):
    def __init__(
        self,
        limits: Limits,
        depth: int,
        worker: FakeWorker,
        host_work: Callable[[], None],
        applied: Callable[[], None],
    ) -> None:
        super().__init__(limits, depth)
        self._worker = worker
        self._host_work = host_work
        self._applied = applied

    def plan(self, now: float) -> BatchPlan | None:
        plan = super().plan(now)
        if plan is not None:
            self._host_work()
            self._worker.submit(plan)
        return plan

    def apply(self, result: StepResult, now: float) -> Progress:
        progress = super().apply(result, now)
        self._worker.applied(result.step)
        self._applied()
        return progress


@dataclass
class Life:
    """What a sequence was told, and what it should be told."""

    sequence: Sequence
    tokens: list[int] = field(default_factory=list)
    ended: EndReason | None = None

    def check(self) -> None:
        """All that was due, or a part of it when it was cut short."""
        one = self.sequence
        expected, reason = solo_run(unpack_tokens(one.prompt), one.sampling, one.max_new_tokens, one.stop_token_ids)
        if self.ended is EndReason.ABORT:
            assert self.tokens == expected[: len(self.tokens)]
        else:
            assert (self.tokens, self.ended) == (expected, reason), f"sequence {one.id}"


class ActorPair:
    """`device` stands for the time and the luck of a step, `host_work` for the time it takes to plan one."""

    def __init__(
        self, limits: Limits, *, overlap: bool, device: Device, host_work: Callable[[], None] = lambda: None
    ) -> None:
        self._device = device
        self._changed = asyncio.Event()
        self._worker = FakeWorker(
            page_size=limits.page_size,
            num_pages=limits.num_pages,
            max_running=limits.max_running,
            token_budget=limits.token_budget,
            early_uploads=True,
        )
        self.scheduler = _WatchedScheduler(limits, int(overlap), self._worker, host_work, self._changed.set)
        self.lives: dict[SequenceId, Life] = {}
        self._to_scheduler: LocalMailbox[ToScheduler] = LocalMailbox(1 << 16)
        self._to_worker: LocalMailbox[ToWorker] = LocalMailbox(2)
        self._to_text: LocalMailbox[SchedulerToText] = LocalMailbox(1 << 16)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The actors run while the body does."""
        scheduler = SchedulerActor(self.scheduler, self._to_scheduler, self._to_text, (self._to_worker,))
        worker = WorkerActor(self._compute, self._to_worker, self._to_scheduler)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run) for run in (scheduler.run(), worker.run(), self._hear())]
            yield
            for task in tasks:
                task.cancel()

    def submit(self, sequence: Sequence) -> None:
        self.lives[sequence.id] = Life(sequence)
        self._to_scheduler.put(sequence)

    def abort(self, id: SequenceId) -> None:
        self._to_scheduler.put(Abort(id))

    async def idle(self) -> None:
        """Waits until all sequences have ended and no step is in flight."""
        while self.scheduler.in_flight or not all(life.ended for life in self.lives.values()):
            self._changed.clear()
            await self._changed.wait()

    def check_all_came_back(self) -> None:
        """Every slot is free, every page is free or cached, and the books agree."""
        self.scheduler.check_integrity()
        held: Gauges = self.scheduler.gauges()
        assert (held.waiting, held.running, held.free_slots) == (0, 0, held.total_slots)
        assert held.free_pages + held.cached_pages == held.total_pages, f"not every page came back: {held}"
        assert held.evictable_pages == held.cached_pages, f"pages are locked by nobody: {held}"

    async def _compute(self, plan: BatchPlan) -> StepResult:
        went_well = await self._device()
        return self._worker.run() if went_well else self._worker.fail()

    async def _hear(self) -> None:
        while True:
            message = await self._to_text.receive()
            assert isinstance(message, Progress)
            for id, token in zip(message.sequence_ids, message.tokens, strict=True):
                assert self.lives[id].ended is None, f"a token of sequence {id} after its end"
                self.lives[id].tokens.append(token)
            for end in message.ended:
                assert self.lives[end.id].ended is None, f"sequence {end.id} ended twice"
                self.lives[end.id].ended = end.reason
            self._changed.set()
