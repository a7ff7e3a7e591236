"""The attention backend of a GPU: one launch that prepares heads and writes keys and values, then the rows of each
phase by a backend of their own (phases.py).

Where it stands in the flow: begun once a step, then asked by every layer. What the device must know of the rows goes to
it in one transfer (step_metadata.py). Nothing is read back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl_backend.attention.interface import AttentionVariant, StepRows
from minisgl_backend.attention.phases import DecodeBackend, PhaseAttention, PhaseBackend, PhaseStep, RecordedPhase
from minisgl_backend.attention.step_metadata import describe_step
from minisgl_backend.device.staging import Upload
from minisgl_backend.kernels.gpu.heads import prepare_and_write
from minisgl_backend.kernels.gpu.places import find_places
from minisgl_backend.kernels.interface import HeadPreparation
from minisgl_backend.kvpool.paged import PagedKvPool


class GpuAttention:
    """Reads and writes one pool. Holds no state between steps."""

    def __init__(
        self,
        pool: PagedKvPool,
        variants: Sequence[AttentionVariant],
        *,
        chunks: PhaseBackend,
        decode: DecodeBackend,
        upload: Upload,
    ) -> None:
        """variants: of each layer. chunks, decode: over the same pool and variants."""
        self._pool = pool
        self._variants = tuple(variants)
        self._chunks = chunks
        self._decode = decode
        self._upload = upload

    def begin(self, rows: StepRows) -> GpuStepAttention:
        """See AttentionBackend."""
        metadata = describe_step(rows.starts, rows.lengths, self._pool.page_size, self._chunks.tile_queries)
        (array,) = self._upload([metadata.array])
        step = PhaseStep(metadata.host, metadata.on_device(array), rows.page_tables)
        phases: list[PhaseAttention] = []
        if len(step.host.chunk_rows):
            phases.append(self._chunks.begin(step))
        if len(step.host.decode_rows):
            phases.append(self._decode.begin(step))
        places = find_places(
            step.device.token_rows, step.device.token_positions, rows.page_tables, self._pool.page_size
        )
        return GpuStepAttention(self._pool, self._variants, places, tuple(phases))

    def decode_step(self, positions: Tensor, page_tables: Tensor) -> GpuDecodeStep:
        """See RecordableAttention."""
        every = torch.arange(len(positions), dtype=torch.int32, device=positions.device)
        phase = self._decode.decode_step(positions, page_tables)
        return GpuDecodeStep(self._pool, self._variants, every, positions, page_tables, phase)


@dataclass(frozen=True, slots=True)
class GpuDecodeStep:
    """See DecodeStep."""

    pool: PagedKvPool
    variants: tuple[AttentionVariant, ...]  # of each layer
    rows: Tensor  # [rows] int32: 0, 1, 2 …
    positions: Tensor  # the recording's, as all of this
    page_tables: Tensor
    phase: RecordedPhase

    def begin(self) -> GpuStepAttention:
        places = find_places(self.rows, self.positions, self.page_tables, self.pool.page_size)
        return GpuStepAttention(self.pool, self.variants, places, (self.phase.begin(),))

    def refresh(self, starts: npt.NDArray[np.int64], page_tables: Tensor) -> None:
        self.phase.refresh(starts, page_tables)


@dataclass(frozen=True, slots=True)
class GpuStepAttention:
    """See StepAttention."""

    pool: PagedKvPool
    variants: tuple[AttentionVariant, ...]  # of each layer
    places: Tensor  # [tokens] int64: page · page_size + offset, where each token's keys and values go
    phases: tuple[PhaseAttention, ...]  # every token belongs to one of them

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None = None,
        preparation: HeadPreparation | None = None,
    ) -> Tensor:
        """See StepAttention."""
        declared = self.variants[layer].sinks
        assert (sinks is not None) == declared, f"layer {layer}: sinks are given, or declared, but not both"
        q = prepare_and_write(q, k, v, preparation, *self.pool.layer(layer), self.places)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for phase in self.phases:
            phase.attend(layer, q, out, sinks)
        return out.flatten(1)
