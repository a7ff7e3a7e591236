"""The worker actor: runs plans strictly in order on one device and answers each with its tokens.

    scheduler ── BatchPlan ──►  inbox (this) ── StepResult (rank 0 only) ──►  scheduler

On a CPU a step blocks whoever launches it. In a process of its own it may: ZeroMQ's thread takes in the next plan
meanwhile. Inline, it runs in a thread, so that the other actors of the process live on. Either way a plan that was made
while a step ran is here when it ends, and is run at once. On a GPU a launch returns while the step is on its way: the
next plan is launched behind it as soon as it is here, so the device never waits for the host, and a thread waits for
the tokens.

    device   ├─ step 1 ─┤├─ step 2 ─┤├─ step 3 ─┤
    host     l1 l2       r1  l3      r2  l4         l: launch, r: answer
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from minisgl_backend.actors.mailbox import Inbox, Outlet
from minisgl_backend.actors.step_trace import NO_TRACE, StepTrace
from minisgl_backend.messages.control import Halt
from minisgl_backend.messages.plan import BatchPlan, StepResult
from minisgl_backend.worker.runner import Launched

Outcome = StepResult | asyncio.Future[StepResult]
Compute = Callable[[BatchPlan], Awaitable[Outcome]]
ToWorker = BatchPlan | Halt

_UNDER_WAY = 2
"""Steps at most: one that the device works on, and one that it finds when it is done."""


def in_place(launch: Callable[[BatchPlan], Launched]) -> Compute:
    """The launch blocks this loop."""

    async def compute(plan: BatchPlan) -> Outcome:
        return _outcome(launch(plan))

    return compute


def in_thread(launch: Callable[[BatchPlan], Launched]) -> Compute:
    """The launch runs beside this loop."""

    async def compute(plan: BatchPlan) -> Outcome:
        return _outcome(await asyncio.to_thread(launch, plan))

    return compute


def _outcome(launched: Launched) -> Outcome:
    """A thread waits for what is not there."""
    if isinstance(launched, StepResult):
        return launched
    return asyncio.get_running_loop().run_in_executor(None, launched.result)


@dataclass(frozen=True, slots=True)
class _Step:
    """One that was launched and not yet answered."""

    plan: BatchPlan
    began_s: float
    outcome: Outcome

    @property
    def done(self) -> bool:
        return isinstance(self.outcome, StepResult) or self.outcome.done()


class WorkerActor:
    """Owns one rank's device state through `compute`. An error of a step ends the actor."""

    def __init__(
        self,
        compute: Compute,
        inbox: Inbox[ToWorker],
        to_scheduler: Outlet[StepResult] | None,
        trace: StepTrace = NO_TRACE,
    ) -> None:
        self._compute = compute
        self._inbox = inbox
        self._to_scheduler = to_scheduler  # None on every rank but 0
        self._trace = trace
        self._plans: deque[BatchPlan] = deque()  # received, not yet launched
        self._steps: deque[_Step] = deque()  # launched, not yet answered
        self._receiving: asyncio.Future[ToWorker] | None = None  # begun while a step was on its way
        self._halted = False

    async def run(self) -> None:
        """Until Halt, which goes before the plans that wait, and is not kept up by steps on their way."""
        try:
            while not self._halted or (self._steps and self._steps[0].done):
                if self._steps and self._steps[0].done:
                    await self._answer(self._steps.popleft())
                elif self._plans and len(self._steps) < _UNDER_WAY:
                    await self._launch(self._plans.popleft())
                else:
                    await self._hear()
        finally:
            if self._receiving is not None:
                self._receiving.cancel()

    async def _launch(self, plan: BatchPlan) -> None:
        began_s = time.monotonic()
        self._steps.append(_Step(plan, began_s, await self._compute(plan)))
        while self._receiving is None and (message := self._inbox.receive_nowait()) is not None:
            self._take(message)  # before the answer: it came while the step ran

    async def _answer(self, step: _Step) -> None:
        result = step.outcome if isinstance(step.outcome, StepResult) else step.outcome.result()
        ended_s = time.monotonic()
        if self._to_scheduler is not None:
            await self._to_scheduler.send(result)
        plan, ahead = step.plan, len(self._plans) + len(self._steps)
        facts = {"step": plan.step, "rows": len(plan.row_slots), "tokens": sum(plan.row_lengths)}
        self._trace.span("step", step.began_s, ended_s, **facts, next_plan_here=ahead)

    async def _hear(self) -> None:
        """Waits for a message, or for the step that is on its way."""
        if not self._steps:
            self._trace.flush()
            receiving, self._receiving = self._receiving, None
            self._take(await (receiving or self._inbox.receive()))
            return
        outcome = self._steps[0].outcome
        assert not isinstance(outcome, StepResult), "it would have been answered"
        if self._receiving is None:
            self._receiving = asyncio.ensure_future(self._inbox.receive())
        await asyncio.wait((self._receiving, outcome), return_when=asyncio.FIRST_COMPLETED)
        if self._receiving.done():
            receiving, self._receiving = self._receiving, None
            self._take(receiving.result())

    def _take(self, message: ToWorker) -> None:
        if isinstance(message, Halt):
            self._halted = True
        else:
            self._plans.append(message)
