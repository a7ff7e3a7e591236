"""How the rows of one phase attend on a GPU: chunk rows, or decode rows. Each phase may have a backend of its own.

Where it stands in the flow: `GpuAttention` writes the keys and values of a whole step, then lets both phases attend.
Backends hold the pool and the variants of all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from minisgl_backend.attention.step_metadata import Ints, StepFields


@dataclass(frozen=True, slots=True)
class PhaseStep:
    """All rows of a step, those of the other phase among them."""

    host: StepFields[Ints]
    device: StepFields[Tensor]  # the same
    page_tables: Tensor  # [rows, n] int64, on the device, as in StepRows


class PhaseAttention(Protocol):
    """The rows of one phase in one step; dropped when the step is done."""

    def attend(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None) -> None:
        """q, out [tokens, heads, head_dim] of the whole step, in the pool's dtype, out without gaps: writes the tokens
        of this phase in `out`, and no others. Keys and values of the whole step are in the pool. sinks [heads]: as in
        StepAttention; given where the layer's variant has some, and nowhere else.
        """
        ...


class PhaseBackend(Protocol):
    """One per worker and phase."""

    @property
    def tile_queries(self) -> int:
        """Most queries of a tile in the step's metadata; 0: tiles are not asked for."""
        ...

    def begin(self, step: PhaseStep) -> PhaseAttention:
        """The step has a row of this phase."""
        ...


class RecordedPhase(Protocol):
    """Decode rows of a recording: see RecordableAttention."""

    def begin(self) -> PhaseAttention:
        """Called in the recording."""
        ...

    def refresh(self, starts: npt.NDArray[np.int64], page_tables: Tensor) -> None:
        """Called on the host before the recording, and before each replay. starts [rows]; page_tables: the recording's,
        filled for the step.
        """
        ...


class DecodeBackend(PhaseBackend, Protocol):
    """Of decode rows, whose steps can be recorded."""

    def decode_step(self, positions: Tensor, page_tables: Tensor) -> RecordedPhase:
        """A step of decode rows alone: row i is token i of the batch and computes positions[i].

        positions [rows], page_tables [rows, n], int64, on the device: the caller's, read again by each replay.
        """
        ...
