"""A backend of phases (attention/phases.py) whose keys and values are written by torch, so that no Triton is needed:
what GpuAttention does, on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl_backend.attention.interface import StepRows
from minisgl_backend.attention.phases import DecodeBackend, PhaseAttention, PhaseBackend, PhaseStep, RecordedPhase
from minisgl_backend.attention.step_metadata import describe_step
from minisgl_backend.kernels.interface import HeadPreparation
from minisgl_backend.kernels.paged_kv import write_kv
from minisgl_backend.kvpool.paged import PagedKvPool


def described(rows: StepRows, page_size: int, tile_queries: int = 0) -> PhaseStep:
    """The fields on the device are a copy of those on the host."""
    metadata = describe_step(rows.starts, rows.lengths, page_size, tile_queries)
    return PhaseStep(metadata.host, metadata.on_device(torch.from_numpy(metadata.array.copy())), rows.page_tables)


@dataclass(frozen=True)
class PhasedAttention:
    """See RecordableAttention."""

    pool: PagedKvPool
    chunks: PhaseBackend
    decode: DecodeBackend

    def begin(self, rows: StepRows) -> PhasedStep:
        step = described(rows, self.pool.page_size, self.chunks.tile_queries)
        phases = [self.chunks.begin(step)] if len(step.host.chunk_rows) else []
        phases += [self.decode.begin(step)] if len(step.host.decode_rows) else []
        rows_of, positions = step.device.token_rows.long(), step.device.token_positions.long()
        return PhasedStep(self.pool, _places(positions, rows.page_tables[rows_of], self.pool.page_size), phases)

    def decode_step(self, positions: Tensor, page_tables: Tensor) -> RecordedStep:
        return RecordedStep(self.pool, positions, page_tables, self.decode.decode_step(positions, page_tables))


@dataclass(frozen=True)
class RecordedStep:
    """See DecodeStep."""

    pool: PagedKvPool
    positions: Tensor
    page_tables: Tensor
    phase: RecordedPhase

    def begin(self) -> PhasedStep:
        places = _places(self.positions, self.page_tables, self.pool.page_size)
        return PhasedStep(self.pool, places, [self.phase.begin()])

    def refresh(self, starts: npt.NDArray[np.int64], page_tables: Tensor) -> None:
        self.phase.refresh(starts, page_tables)


@dataclass(frozen=True)
class PhasedStep:
    """See StepAttention."""

    pool: PagedKvPool
    places: Tensor
    phases: Sequence[PhaseAttention]

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None = None,
        preparation: HeadPreparation | None = None,
    ) -> Tensor:
        if preparation is not None:
            q, k = preparation(q, k)
        write_kv(*self.pool.layer(layer), k, v, self.places)
        out = torch.empty(q.shape, dtype=q.dtype)
        for phase in self.phases:
            phase.attend(layer, q, out, sinks)
        return out.flatten(1)


def _places(positions: Tensor, tables: Tensor, page_size: int) -> Tensor:
    """tables [tokens, n]: of each token's row."""
    pages = tables.gather(1, (positions // page_size)[:, None])[:, 0]
    return pages * page_size + positions % page_size
