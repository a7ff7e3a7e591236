"""Which slots a failed step has left without their tokens and K/V.

Where it stands in the flow: a runner asks here before each step. When a step fails, the scheduler may have planned the
next one already; that one must not run on what is not there. Afterwards every sequence is admitted anew. Pure.
"""

from __future__ import annotations

from minisgl_backend.messages.plan import BatchPlan, StepResult


class SpoiltSlots:
    """All slots are sound until a step fails; a slot is sound again when a plan admits somebody to it."""

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._spoilt: set[int] = set()  # only asked, never walked

    def void(self, plan: BatchPlan) -> StepResult | None:
        """The answer to a plan that can not run because a step before it failed; None: it can."""
        if not self._spoilt:
            return None
        self._spoilt.difference_update(admission.slot for admission in plan.admissions)
        if self._spoilt.isdisjoint(plan.row_slots):
            return None
        self._spoilt.update(plan.row_slots)
        return StepResult(plan.step, (), "a step before it failed")

    def failed(self, plan: BatchPlan, why: str) -> StepResult:
        """The answer to a plan that has failed on its way: whatever it touched, and those behind it, is gone."""
        self._spoilt.update(range(self._max_running))
        return StepResult(plan.step, (), why)
