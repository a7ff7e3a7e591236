"""The rows of a plan as columns: what the host knows of a step before any of it is computed. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minisgl_backend.messages.plan import BatchPlan
from minisgl_backend.sampling.masks import Rows


@dataclass(frozen=True, slots=True)
class StepColumns:
    """All int64, in plan order; the tokens of the rows lie one row after another."""

    slots: Rows  # [rows]
    starts: Rows  # [rows]: row i computes positions starts[i] … ends[i] - 1
    lengths: Rows  # [rows]
    ends: Rows  # [rows]
    firsts: Rows  # [rows]: where among the tokens a row begins
    token_slots: Rows  # [tokens]
    token_positions: Rows  # [tokens]
    sampled: Rows  # [samples]: the rows that sample
    last_tokens: Rows  # [samples]: the last token of each of these

    @classmethod
    def of(cls, plan: BatchPlan) -> StepColumns:
        """There is at least one row."""
        columns = (plan.row_slots, plan.row_starts, plan.row_lengths, plan.row_samples)
        slots, starts, lengths, samples = (np.asarray(column, np.int64) for column in columns)
        row_ends = np.cumsum(lengths)
        row_of_token = np.repeat(np.arange(len(slots)), lengths)
        sampled = np.flatnonzero(samples)
        return cls(
            slots=slots,
            starts=starts,
            lengths=lengths,
            ends=starts + lengths,
            firsts=row_ends - lengths,
            token_slots=slots[row_of_token],
            token_positions=np.arange(len(row_of_token)) + (starts - row_ends + lengths)[row_of_token],
            sampled=sampled,
            last_tokens=row_ends[sampled] - 1,
        )

    @property
    def decodes(self) -> bool:
        """Every row computes one token and samples the next: a step that can be a recorded one."""
        return len(self.sampled) == len(self.token_slots)
