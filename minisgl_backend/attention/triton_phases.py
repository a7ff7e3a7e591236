"""Both phases by our Triton kernels: phases.py says where they stand, kernels/gpu/attention_*.py what they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl_backend.attention.interface import AttentionVariant
from minisgl_backend.attention.phases import PhaseStep
from minisgl_backend.kernels.gpu.attention_decode import DecodeRows, attend_decode
from minisgl_backend.kernels.gpu.attention_extend import ChunkRows, attend_extend, batch_parts, extend_tile, most_parts
from minisgl_backend.kvpool.paged import PagedKvPool

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_HEAD_DIM = 256


def triton_obstacle(pool: PagedKvPool) -> str:
    """Why the kernels can not serve a pool; empty: they can."""
    k_pages, _ = pool.layer(0)
    head_dim = k_pages.shape[3]
    if head_dim > _MOST_HEAD_DIM:
        return f"head_dim is {head_dim}, and they take 1 … {_MOST_HEAD_DIM}"
    if k_pages.dtype not in _DTYPES:
        return f"keys and values are {k_pages.dtype}"
    return ""


class TritonChunks:
    """See PhaseBackend. The pool has no `triton_obstacle`."""

    def __init__(self, pool: PagedKvPool, variants: Sequence[AttentionVariant], heads: int) -> None:
        """variants: of each layer. heads: of queries, in every layer."""
        assert not (obstacle := triton_obstacle(pool)), obstacle
        self._pool, self._variants = pool, tuple(variants)
        k_pages, _ = pool.layer(0)
        self._tile = extend_tile(heads, k_pages.shape[2], k_pages.shape[3], k_pages.element_size())
        self._most_parts = most_parts(self._tile, heads, k_pages.shape[2])

    @property
    def tile_queries(self) -> int:
        return self._tile.tokens

    def begin(self, step: PhaseStep) -> TritonChunkAttention:
        """See PhaseBackend."""
        of = step.device
        rows = ChunkRows(
            starts=of.starts,
            lengths=of.lengths,
            token_offsets=of.token_offsets,
            page_tables=step.page_tables,
            tile_rows=of.tile_rows,
            tile_firsts=of.tile_firsts,
            split_rows=of.split_rows,
            split_firsts=of.split_firsts,
            split_offsets=of.split_offsets,
            part_tiles=of.part_tiles,
            batches=batch_parts(step.host.split_offsets.tolist(), self._most_parts),
        )
        return TritonChunkAttention(self._pool, self._variants, rows)


class TritonDecode:
    """See DecodeBackend. The pool has no `triton_obstacle`."""

    tile_queries = 0

    def __init__(self, pool: PagedKvPool, variants: Sequence[AttentionVariant]) -> None:
        """variants: of each layer."""
        assert not (obstacle := triton_obstacle(pool)), obstacle
        self._pool, self._variants = pool, tuple(variants)

    def begin(self, step: PhaseStep) -> TritonDecodeAttention:
        """See PhaseBackend."""
        of = step.device
        return self._attention(DecodeRows(of.decode_rows, of.decode_tokens, of.starts, step.page_tables))

    def decode_step(self, positions: Tensor, page_tables: Tensor) -> RecordedTritonDecode:
        """See DecodeBackend."""
        every = torch.arange(len(positions), dtype=torch.int32, device=positions.device)
        return RecordedTritonDecode(self._attention(DecodeRows(every, every, positions, page_tables)))

    def _attention(self, rows: DecodeRows) -> TritonDecodeAttention:
        return TritonDecodeAttention(self._pool, self._variants, rows)


@dataclass(frozen=True, slots=True)
class TritonChunkAttention:
    """See PhaseAttention."""

    pool: PagedKvPool
    variants: tuple[AttentionVariant, ...]  # of each layer
    rows: ChunkRows

    def attend(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None) -> None:
        of, pages = self.variants[layer], self.pool.layer(layer)
        attend_extend(q, *pages, self.rows, out, scale=of.scale, window=of.window, softcap=of.softcap, sinks=sinks)


@dataclass(frozen=True, slots=True)
class TritonDecodeAttention:
    """See PhaseAttention."""

    pool: PagedKvPool
    variants: tuple[AttentionVariant, ...]  # of each layer
    rows: DecodeRows

    def attend(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None) -> None:
        of, pages = self.variants[layer], self.pool.layer(layer)
        attend_decode(q, *pages, self.rows, out, scale=of.scale, window=of.window, softcap=of.softcap, sinks=sinks)


@dataclass(frozen=True, slots=True)
class RecordedTritonDecode:
    """See RecordedPhase. The kernels read positions and page tables themselves, so the host has nothing to do."""

    attention: TritonDecodeAttention

    def begin(self) -> TritonDecodeAttention:
        return self.attention

    def refresh(self, starts: npt.NDArray[np.int64], page_tables: Tensor) -> None:
        pass
