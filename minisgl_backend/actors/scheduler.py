"""The scheduler actor: drives the pure scheduler.

    text ── Sequence, Samples, Abort, Probe, Look ──►  inbox  ◄── StepResult ── worker 0
    text ◄── Progress, Gauges, View ──  (this)  ── BatchPlan ──► every worker

All decisions are in scheduler/; here is only the order of things: take every message that has come, plan, hand the
plans to the workers, and only then report what happened, while the workers run.

With the setting `overlap` the next step is planned as soon as one is handed out, so a worker that ends a step has the
next one already; what it answers is applied while that one runs. When there is no plan, some message will come that
changes it: a result if a step is in flight, else a sequence. So waiting for the inbox is all the waiting there is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Seq

from minisgl_backend.actors.mailbox import Inbox, Outlet
from minisgl_backend.actors.step_trace import NO_TRACE, StepTrace
from minisgl_backend.actors.watchdog import Watchdog
from minisgl_backend.messages.control import Begin, Halt
from minisgl_backend.messages.engine import Abort, Look, Probe, Progress, Samples, SchedulerToText, Sequence
from minisgl_backend.messages.plan import BatchPlan, StepResult
from minisgl_backend.scheduler.samples import sequences_of
from minisgl_backend.scheduler.scheduler import Scheduler

_log = logging.getLogger(__name__)

ToScheduler = Sequence | Samples | Abort | Probe | Look | StepResult | Begin | Halt


class SchedulerActor:
    """Owns the scheduler and with it every slot and page of the engine group."""

    def __init__(
        self,
        scheduler: Scheduler,
        inbox: Inbox[ToScheduler],
        to_text: Outlet[SchedulerToText],
        to_workers: Seq[Outlet[BatchPlan]],
        trace: StepTrace = NO_TRACE,
        watchdog: Watchdog | None = None,
    ) -> None:
        """watchdog: of steps that are not answered; None: nobody watches."""
        self._scheduler = scheduler
        self._inbox = inbox
        self._to_text = to_text
        self._to_workers = to_workers
        self._trace = trace
        self._watchdog = watchdog or Watchdog(0.0, lambda late: None)
        self._reports: list[SchedulerToText] = []

    async def run(self) -> None:
        """Until Halt."""
        self._watchdog.start()
        try:
            await self._live()
        finally:
            self._watchdog.close()

    async def _live(self) -> None:
        while True:
            message: ToScheduler | None = await self._inbox.receive()
            while message is not None:
                if isinstance(message, Halt):
                    return
                self._take(message)
                message = self._inbox.receive_nowait()
            await self._hand_out()
            await self._send_reports()
            if not self._scheduler.in_flight:
                self._trace.flush()

    async def _hand_out(self) -> None:
        """Every plan there can be before the next result: one when nothing runs, with overlap one more."""
        while True:
            now = time.monotonic()
            self._report(self._scheduler.expire(now))
            plan = self._scheduler.plan(now)
            if plan is None:
                return
            for worker in self._to_workers:
                await worker.send(plan)
            self._watchdog.handed_out(plan)
            self._trace.span("plan", now, time.monotonic(), step=plan.step, rows=len(plan.row_slots))

    async def _send_reports(self) -> None:
        if not self._reports:
            return
        began_s = time.monotonic()
        for report in self._reports:
            await self._to_text.send(report)
        self._trace.span("report", began_s, time.monotonic(), messages=len(self._reports))
        self._reports.clear()

    def _take(self, message: ToScheduler) -> None:
        if isinstance(message, StepResult):
            self._watchdog.answered(message.step)
            if message.failed:
                _log.error("step %d failed: %s", message.step, message.failed)
            now = time.monotonic()
            self._report(self._scheduler.apply(message, now))
            more = int(self._scheduler.has_work)
            self._trace.span("apply", now, time.monotonic(), step=message.step, more_to_do=more)
        elif isinstance(message, Sequence):
            self._report(self._scheduler.add(message, time.monotonic()))
        elif isinstance(message, Samples):
            for sequence in sequences_of(message):
                self._report(self._scheduler.add(sequence, time.monotonic()))
        elif isinstance(message, Abort):
            self._report(self._scheduler.abort(message.id))
        elif isinstance(message, Probe):
            self._reports.append(self._scheduler.gauges())
        elif isinstance(message, Look):
            self._reports.append(self._scheduler.view(message, time.monotonic()))

    def _report(self, progress: Progress) -> None:
        if progress.sequence_ids or progress.ended or progress.prompt_logprobs:
            self._reports.append(progress)
