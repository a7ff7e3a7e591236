"""The native attention backend: kernels of our own for a CPU, for all rows of a step in one operator per layer.

Where it stands in the flow: like the torch backend, begun once a step, then asked by every layer. Kernels read starts,
lengths and page tables from memory when they run, so a step that is recorded once can be replayed over tensors that
are written anew for each step (`NativeStepAttention` over static ones).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl_backend.attention.interface import AttentionVariant, StepRows
from minisgl_backend.kernels.interface import HeadPreparation
from minisgl_backend.kernels.native.kernels import prepare_and_write
from minisgl_backend.kernels.native.library import Library
from minisgl_backend.kvpool.paged import PagedKvPool

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def native_obstacle(pool: PagedKvPool) -> str:
    """Why the kernels can not serve a pool; empty: they can."""
    k_pages, _ = pool.layer(0)
    head_dim = k_pages.shape[3]
    if k_pages.device.type != "cpu":
        return f"they are for a CPU, not for {k_pages.device.type}"
    if head_dim % 16 or not 16 <= head_dim <= 256:
        return f"head_dim is {head_dim}, and they take 16, 32, 48 … 256"
    if k_pages.dtype not in _DTYPES:
        return f"keys and values are {k_pages.dtype}"
    return ""


class NativeAttention:
    """Reads and writes one pool. Holds no state between steps."""

    def __init__(self, pool: PagedKvPool, variants: Sequence[AttentionVariant], library: Library) -> None:
        """variants: of each layer. The pool has no `native_obstacle`."""
        assert not (obstacle := native_obstacle(pool)), obstacle
        self._pool = pool
        self._variants = tuple(variants)
        self._library = library

    def begin(self, rows: StepRows) -> NativeStepAttention:
        """See AttentionBackend."""
        lengths = np.ascontiguousarray(rows.lengths, np.int64)
        return self.begin_rows(
            NativeRows(
                starts=torch.from_numpy(np.ascontiguousarray(rows.starts, np.int64)),
                lengths=torch.from_numpy(lengths),
                begins=torch.from_numpy(np.cumsum(lengths) - lengths),
                page_tables=rows.page_tables.contiguous(),
                places=torch.empty(int(lengths.sum()), dtype=torch.int64),
                singles=torch.from_numpy(np.flatnonzero(lengths == 1)),
                chunks=torch.from_numpy(np.flatnonzero(lengths > 1)),
            )
        )

    def decode_step(self, positions: Tensor, page_tables: Tensor) -> NativeDecodeStep:
        """See RecordableAttention."""
        rows = len(positions)
        index = torch.arange(rows)
        native = NativeRows(
            starts=positions,
            lengths=torch.ones(rows, dtype=torch.int64),
            begins=index,
            page_tables=page_tables,
            places=torch.empty(rows, dtype=torch.int64),
            singles=index,
            chunks=torch.empty(0, dtype=torch.int64),
        )
        return NativeDecodeStep(self, native)

    def begin_rows(self, rows: NativeRows) -> NativeStepAttention:
        """Computes where the rows' tokens go, in one launch."""
        self._library.ops.fill_places.default(
            rows.places, rows.starts, rows.lengths, rows.begins, rows.page_tables, self._pool.page_size
        )
        return NativeStepAttention(self._pool, self._variants, self._library, rows)


@dataclass(frozen=True, slots=True)
class NativeDecodeStep:
    """See DecodeStep. Kernels read all there is to know themselves, when they run."""

    attention: NativeAttention
    rows: NativeRows

    def begin(self) -> NativeStepAttention:
        """See DecodeStep."""
        return self.attention.begin_rows(self.rows)

    def refresh(self, starts: npt.NDArray[np.int64], page_tables: Tensor) -> None:
        """See DecodeStep."""


@dataclass(frozen=True, slots=True)
class NativeRows:
    """The rows of a step as kernels read them: int64 tensors without gaps. A recording keeps reading these very ones.

    Row i computes positions starts[i] … starts[i] + lengths[i] - 1; its first token is number begins[i] of the batch.
    """

    starts: Tensor  # [rows]
    lengths: Tensor  # [rows]
    begins: Tensor  # [rows]
    page_tables: Tensor  # [rows, n], as in StepRows
    places: Tensor  # [tokens]: page · page_size + offset, where each token's keys and values go
    singles: Tensor  # [m]: indices of the rows of one token
    chunks: Tensor  # [m]: of the others


@dataclass(frozen=True, slots=True)
class NativeStepAttention:
    """See StepAttention."""

    pool: PagedKvPool
    variants: tuple[AttentionVariant, ...]  # of each layer
    library: Library
    rows: NativeRows

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
        variant, rows, pages, ops = self.variants[layer], self.rows, self.pool.layer(layer), self.library.ops
        assert (sinks is not None) == variant.sinks, f"layer {layer}: sinks are given, or declared, but not both"
        if preparation is None:
            ops.write_kv.default(*pages, k, v, rows.places)
        else:
            q = prepare_and_write(ops, q, k, v, preparation, pages, rows.places)
        out: Tensor = ops.attend.default(
            q,
            *pages,
            rows.starts,
            rows.lengths,
            rows.begins,
            rows.page_tables,
            rows.singles,
            rows.chunks,
            variant.scale,
            variant.window,
            variant.softcap,
            sinks,
        )
        return out.flatten(1)
