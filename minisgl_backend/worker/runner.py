"""What the worker actor drives: one rank's device state, one step at a time."""

from __future__ import annotations

from typing import Protocol

from minisgl_backend.messages.plan import BatchPlan, StepResult


class Pending(Protocol):
    """A step that was launched and is not known to be done."""

    def result(self) -> StepResult:
        """Waits for it. From any thread; raises what went wrong on the device."""
        ...


Launched = StepResult | Pending
"""What a launch comes to: a device that is busy while it is launched has the result already, and so has a step that
failed at once.
"""


class StepRunner(Protocol):
    """Owns weights, KV pool and per-slot state of one rank. Not thread-safe: one step at a time."""

    @property
    def num_pages(self) -> int:
        """KV pages 0 … num_pages - 1 that plans may name."""
        ...

    def warm_up(self) -> None:
        """Runs steps on a scratch page, so that the first request finds everything loaded. Before the first plan."""
        ...

    def launch(self, plan: BatchPlan) -> Launched:
        """Begins one step. Plans must come in order: 1, 2, 3, … An exception leaves the state undefined.

        The next one may be launched before this one is done: what that one needs of it stays on the device. A step that
        ran out of memory is answered with a result that says so, and so is a plan that was made before the scheduler
        knew: the runner goes on.
        """
        ...

    def run(self, plan: BatchPlan) -> StepResult:
        """The same, and waits for it."""
        ...

    def close(self) -> None:
        """Drops the device state. Nothing may be called afterwards."""
        ...
