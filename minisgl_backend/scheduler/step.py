"""One step while it is built, and what must be remembered of it until its result comes.

Where it stands in the flow: `Scheduler.plan` fills a StepDraft and turns it into the BatchPlan for the workers and
the StepInFlight that `Scheduler.apply` reads the result by.
"""

from __future__ import annotations

from minisgl_backend.messages.ids import SlotId, StepId
from minisgl_backend.messages.plan import Admission, BatchPlan, PageGrant
from minisgl_backend.scheduler.sequence import SequenceState


class StepInFlight:
    """A step that was planned and not yet applied. Results map to sequences by order and epoch, never by slot."""

    __slots__ = ("epochs", "sampled", "step")

    def __init__(self, step: StepId, sampled: list[SequenceState]) -> None:
        self.step = step
        self.sampled = sampled  # the sequences of the rows that sample, in plan order
        self.epochs = [state.epoch for state in sampled]  # of `sampled`, when the step was planned


class StepDraft:
    """The columns of a plan. The decode path of the scheduler appends to them itself; chunks use `chunk`."""

    __slots__ = ("admissions", "grants", "row_lengths", "row_samples", "row_slots", "row_starts", "sampled", "step")

    def __init__(self, step: StepId) -> None:
        self.step = step
        self.admissions: list[Admission] = []
        self.grants: list[PageGrant] = []
        self.row_slots: list[SlotId] = []
        self.row_starts: list[int] = []
        self.row_lengths: list[int] = []
        self.row_samples: list[int] = []
        self.sampled: list[SequenceState] = []

    def chunk(self, state: SequenceState, length: int) -> None:
        """A row for the next `length` known tokens of `state`; it samples when none is left. Counts advance here."""
        end = state.computed + length
        self.row_slots.append(state.slot)
        self.row_starts.append(state.computed)
        self.row_lengths.append(length)
        if end == state.known:
            self.row_samples.append(1)
            self.sampled.append(state)
        else:
            self.row_samples.append(0)
        state.computed = end
        state.last_step = self.step

    def freeze(self) -> tuple[BatchPlan, StepInFlight]:
        plan = BatchPlan(
            self.step,
            tuple(self.admissions),
            tuple(self.grants),
            tuple(self.row_slots),
            tuple(self.row_starts),
            tuple(self.row_lengths),
            tuple(self.row_samples),
        )
        return plan, StepInFlight(self.step, self.sampled)
