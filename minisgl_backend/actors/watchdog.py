"""The watchdog of steps: notices that the workers owe a result for longer than the setting `step_limit_s`.

    scheduler actor ── handed_out, answered ──►  Watchdog ── on_late ──►  who ends the group

A worker may hang without having died: in a driver, in a collective whose other side is gone, in a lock. Steps run one
after another, so the time of a step begins when the one before it was answered. It looks from time to time, and costs
a step nothing but two assignments. Its looks are counted, not timed: who was stopped together with the workers (Ctrl-Z,
a frozen container) has not waited for them meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from minisgl_backend.messages.control import Late
from minisgl_backend.messages.plan import BatchPlan

_LAST_PLANS = 8
_LOOKS = 20  # in the time that a step may take; one more must find it unanswered
_ROWS_SHOWN = 64


class Watchdog:
    """Owned by the scheduler actor; `start` arms it, `close` ends it. on_late is called once, in the loop."""

    def __init__(
        self, limit_s: float, on_late: Callable[[Late], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """limit_s: 0: it never calls."""
        self._limit_s = limit_s
        self._on_late = on_late
        self._clock = clock
        self._plans: deque[BatchPlan] = deque(maxlen=_LAST_PLANS)
        self._answered = 0  # the last step
        self._since_s = 0.0
        self._looked_at = 0  # the step that was due at the last look
        self._found = 0  # looks in a row that found it unanswered
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._limit_s:
            self._timer = asyncio.get_running_loop().call_later(self._limit_s / _LOOKS, self._look)

    def handed_out(self, plan: BatchPlan) -> None:
        if not self._plans or self._plans[-1].step == self._answered:  # nothing was in flight
            self._since_s = self._clock()
        self._plans.append(plan)

    def answered(self, step: int) -> None:
        self._answered = step
        self._since_s = self._clock()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        due = self._answered + 1
        if not self._plans or self._plans[-1].step < due:
            self._found = 0
        else:
            self._found = self._found + 1 if due == self._looked_at else 1
        self._looked_at = due
        if self._found > _LOOKS:
            waited_s = self._clock() - self._since_s
            self._on_late(Late(due, waited_s, tuple(describe_plan(plan) for plan in self._plans)))
        else:
            self.start()


def describe_plan(plan: BatchPlan) -> str:
    """One line; of prompts only their lengths."""
    rows = list(zip(plan.row_slots, plan.row_starts, plan.row_lengths, plan.row_samples, strict=True))
    shown = " ".join(
        f"{slot}:{start}+{length}{'s' if sample else ''}" for slot, start, length, sample in rows[:_ROWS_SHOWN]
    )
    more = f" and {len(rows) - _ROWS_SHOWN} more" if len(rows) > _ROWS_SHOWN else ""
    admitted = " ".join(f"{admission.slot}:{len(admission.prompt) // 4}" for admission in plan.admissions)
    granted = sum(len(grant.pages) for grant in plan.grants)
    line = f"step {plan.step}: {len(rows)} rows (slot:start+length, s: samples) {shown}{more}; {granted} pages granted"
    return f"{line}; admitted (slot:tokens) {admitted}" if admitted else line
