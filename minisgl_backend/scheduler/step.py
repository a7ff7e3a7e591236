"""One step while it is built, and what must be remembered of it until its result comes.

Where it stands in the flow: `Scheduler.plan` has a StepDraft filled by `planner.py` and turns it into the BatchPlan
for the workers and the StepInFlight that `Scheduler.apply` reads the result by.
"""

from __future__ import annotations

import msgspec

from minisgl_backend.messages.engine import Told
from minisgl_backend.messages.ids import SlotId, StepId
from minisgl_backend.messages.plan import NO_TOKEN, Admission, BatchPlan, PageGrant, StepResult
from minisgl_backend.messages.sampling import NO_LOGPROBS
from minisgl_backend.scheduler.sequence import SequenceState


class StepInFlight:
    """A step that was planned and not yet applied. Results map to sequences by order and epoch, never by slot."""

    __slots__ = (
        "alone",
        "alone_epoch",
        "decode_rows",
        "epochs",
        "planned_s",
        "prompt_tokens",
        "prompts",
        "sampled",
        "step",
        "void",
    )

    def __init__(self, draft: StepDraft, now: float) -> None:
        self.step = draft.step
        self.sampled = draft.sampled  # the sequences of the rows that sample, in plan order
        self.epochs = [state.epoch for state in draft.sampled]  # of `sampled`, when the step was planned
        self.prompts = [(state, state.epoch) for state in draft.prompts]  # of whose rows the prompt's logprobs come
        self.void = False  # a step before it failed: whatever it brings is nothing
        self.alone = draft.last_state if len(draft.row_slots) == 1 else None  # the only one with a row
        self.alone_epoch = self.alone.epoch if self.alone is not None else 0
        self.planned_s = now
        self.decode_rows = draft.decode_rows
        self.prompt_tokens = sum(draft.row_lengths) - draft.decode_rows

    def told(self, result: StepResult) -> tuple[tuple[Told, ...], tuple[Told, ...]]:
        """Logprobs of the tokens that count, and of prompts. To be asked before anybody is ended by the result."""
        asking = [
            (state, epoch, token)
            for state, epoch, token in zip(self.sampled, self.epochs, result.tokens, strict=True)
            if state.sampling.logprobs != NO_LOGPROBS
        ]
        of_tokens = tuple(
            Told(state.id, logprobs)
            for (state, epoch, token), logprobs in zip(asking, result.logprobs, strict=True)
            if state.epoch == epoch and token != NO_TOKEN
        )
        of_prompts = tuple(
            Told(state.id, logprobs)
            for (state, epoch), logprobs in zip(self.prompts, result.prompt_logprobs, strict=True)
            if state.epoch == epoch
        )
        return of_tokens, of_prompts


class StepDraft:
    """The columns of a plan. The decode path of the scheduler appends to them itself; chunks use `chunk`."""

    __slots__ = (
        "admissions",
        "decode_rows",
        "grammars",
        "grants",
        "last_state",
        "prompts",
        "row_lengths",
        "row_samples",
        "row_slots",
        "row_starts",
        "sampled",
        "step",
    )

    def __init__(self, step: StepId) -> None:
        self.step = step
        self.admissions: list[Admission] = []
        self.grammars: set[bytes] = set()  # keys of those that an admission has said
        self.grants: list[PageGrant] = []
        self.row_slots: list[SlotId] = []
        self.row_starts: list[int] = []
        self.row_lengths: list[int] = []
        self.row_samples: list[int] = []
        self.sampled: list[SequenceState] = []
        self.prompts: list[SequenceState] = []
        self.decode_rows = 0
        self.last_state: SequenceState | None = None  # of the last row

    def admit(self, state: SequenceState) -> None:
        """The new life of its slot. What its grammar is was said once if an admission before has the same."""
        sampling, grammar = state.sampling, state.sampling.grammar
        if grammar is not None:
            if grammar.key in self.grammars:
                sampling = msgspec.structs.replace(sampling, grammar=msgspec.structs.replace(grammar, compiled=b""))
            self.grammars.add(grammar.key)
        self.admissions.append(Admission(state.slot, state.tokens, sampling, state.known - state.prompt_tokens))

    def chunk(self, state: SequenceState, end: int) -> None:
        """A row for the known tokens up to `end`; it samples when none is left. Counts advance here.

        The pages that the worker was not told of yet come with it.
        """
        if state.told_pages < len(state.pages):
            self.grants.append(PageGrant(state.slot, tuple(state.pages[state.told_pages :])))
            state.told_pages = len(state.pages)
        if state.computed < state.prompt_tokens - 1 and not state.reads_cache:
            self.prompts.append(state)
        self.row_slots.append(state.slot)
        self.row_starts.append(state.computed)
        self.row_lengths.append(end - state.computed)
        if end == state.known:
            self.row_samples.append(1)
            self.sampled.append(state)
        else:
            self.row_samples.append(0)
        state.computed = end
        state.last_step = self.step
        self.last_state = state

    def freeze(self, now: float) -> tuple[BatchPlan, StepInFlight]:
        plan = BatchPlan(
            self.step,
            tuple(self.admissions),
            tuple(self.grants),
            tuple(self.row_slots),
            tuple(self.row_starts),
            tuple(self.row_lengths),
            tuple(self.row_samples),
        )
        return plan, StepInFlight(self, now)
