"""The scheduler actor: drives the pure scheduler.

    text ── Sequence, Abort, Probe ──►  inbox  ◄── StepResult ── worker 0
    text ◄── Progress, Gauges ──  (this)  ── BatchPlan ──► every worker

All decisions are in scheduler/; here is only the order of things: take every message that has come, plan, hand the
plan to the workers, and only then report what happened, while the workers run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Seq

from minisgl_backend.actors.mailbox import Inbox, Outlet
from minisgl_backend.messages.control import Begin, Halt
from minisgl_backend.messages.engine import Abort, Gauges, Probe, Progress, SchedulerToText, Sequence
from minisgl_backend.messages.plan import BatchPlan, StepResult
from minisgl_backend.scheduler.scheduler import Scheduler

_log = logging.getLogger(__name__)

ToScheduler = Sequence | Abort | Probe | StepResult | Begin | Halt


class SchedulerActor:
    """Owns the scheduler and with it every slot and page of the engine group."""

    def __init__(
        self,
        scheduler: Scheduler,
        inbox: Inbox[ToScheduler],
        to_text: Outlet[SchedulerToText],
        to_workers: Seq[Outlet[BatchPlan]],
    ) -> None:
        self._scheduler = scheduler
        self._inbox = inbox
        self._to_text = to_text
        self._to_workers = to_workers
        self._reports: list[Progress | Gauges] = []

    async def run(self) -> None:
        """Until Halt."""
        while True:
            message: ToScheduler | None = await self._inbox.receive()
            while message is not None:
                if isinstance(message, Halt):
                    return
                self._take(message)
                message = self._inbox.receive_nowait()
            now = time.monotonic()
            self._report(self._scheduler.expire(now))
            plan = self._scheduler.plan(now)
            if plan is not None:
                for worker in self._to_workers:
                    await worker.send(plan)
            for report in self._reports:
                await self._to_text.send(report)
            self._reports.clear()

    def _take(self, message: ToScheduler) -> None:
        if isinstance(message, StepResult):
            if message.failed:
                _log.error("step %d failed: %s", message.step, message.failed)
            self._report(self._scheduler.apply(message, time.monotonic()))
        elif isinstance(message, Sequence):
            self._report(self._scheduler.add(message, time.monotonic()))
        elif isinstance(message, Abort):
            self._report(self._scheduler.abort(message.id))
        elif isinstance(message, Probe):
            self._reports.append(self._scheduler.gauges())

    def _report(self, progress: Progress) -> None:
        if progress.sequence_ids or progress.ended:
            self._reports.append(progress)
