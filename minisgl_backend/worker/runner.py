"""What the worker actor drives: one rank's device state, one step at a time."""

from __future__ import annotations

from typing import Protocol

from minisgl_backend.messages.plan import BatchPlan, StepResult


class StepRunner(Protocol):
    """Owns weights, KV pool and per-slot state of one rank. Not thread-safe: one step at a time."""

    @property
    def num_pages(self) -> int:
        """KV pages 0 … num_pages - 1 that plans may name."""
        ...

    def warm_up(self) -> None:
        """Runs steps on a scratch page, so that the first request finds everything loaded. Before the first plan."""
        ...

    def run(self, plan: BatchPlan) -> StepResult:
        """One step, blocking. Plans must come in order: 1, 2, 3, … An exception leaves the state undefined.

        A step that ran out of memory is answered with a result that says so, and so is a plan that was made before
        the scheduler knew: the runner goes on.
        """
        ...

    def close(self) -> None:
        """Drops the device state. Nothing may be called afterwards."""
        ...
