"""The worker actor: runs plans strictly in order on one device and answers each with its tokens.

    scheduler ── BatchPlan ──►  inbox (this) ── StepResult (rank 0 only) ──►  scheduler

The step itself (worker/) blocks. In a process of its own it may: ZeroMQ's thread takes in the next plan meanwhile.
Inline, it runs in a thread, so that the other actors of the process live on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from minisgl_backend.actors.mailbox import Inbox, Outlet
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

    def __init__(self, compute: Compute, inbox: Inbox[ToWorker], to_scheduler: Outlet[StepResult] | None) -> None:
        self._compute = compute
        self._inbox = inbox
        self._to_scheduler = to_scheduler  # None on every rank but 0

    async def run(self) -> None:
        """Until Halt."""
        while True:
            message = await self._inbox.receive()
            if isinstance(message, Halt):
                return
            if isinstance(message, BatchPlan):
                result = await self._compute(message)
                if self._to_scheduler is not None:
                    await self._to_scheduler.send(result)
