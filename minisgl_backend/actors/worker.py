"""The worker actor: runs plans strictly in order on one device and answers each with its tokens.

    scheduler ── BatchPlan ──►  inbox (this) ── StepResult (rank 0 only) ──►  scheduler

The step itself (worker/) blocks. In a process of its own it may: ZeroMQ's thread takes in the next plan meanwhile.
Inline, it runs in a thread, so that the other actors of the process live on. Either way a plan that was made while a
step ran is here when it ends, and is run at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable

from minisgl_backend.actors.mailbox import Inbox, Outlet
from minisgl_backend.actors.step_trace import NO_TRACE, StepTrace
from minisgl_backend.messages.control import Halt
from minisgl_backend.messages.plan import BatchPlan, StepResult

Compute = Callable[[BatchPlan], Awaitable[StepResult]]
ToWorker = BatchPlan | Halt


def in_place(run: Callable[[BatchPlan], StepResult]) -> Compute:
    """The step blocks this loop."""

    async def compute(plan: BatchPlan) -> StepResult:
        return run(plan)

    return compute


def in_thread(run: Callable[[BatchPlan], StepResult]) -> Compute:
    """The step runs beside this loop."""

    async def compute(plan: BatchPlan) -> StepResult:
        return await asyncio.to_thread(run, plan)

    return compute


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
        self._plans: deque[BatchPlan] = deque()  # received, not yet run
        self._halted = False

    async def run(self) -> None:
        """Until Halt, which goes before the plans that wait."""
        while not self._halted:
            if self._plans:
                await self._step(self._plans.popleft())
            else:
                self._trace.flush()
                self._take(await self._inbox.receive())

    async def _step(self, plan: BatchPlan) -> None:
        began_s = time.monotonic()
        result = await self._compute(plan)
        ended_s = time.monotonic()
        while (message := self._inbox.receive_nowait()) is not None:  # before the answer: it came while the step ran
            self._take(message)
        if self._to_scheduler is not None:
            await self._to_scheduler.send(result)
        facts = {"step": plan.step, "rows": len(plan.row_slots), "tokens": sum(plan.row_lengths)}
        self._trace.span("step", began_s, ended_s, **facts, next_plan_here=len(self._plans))

    def _take(self, message: ToWorker) -> None:
        if isinstance(message, Halt):
            self._halted = True
        else:
            self._plans.append(message)
