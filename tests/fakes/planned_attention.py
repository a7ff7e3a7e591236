"""Attention of decode rows as a GPU has it, in plain operators: what can be recorded, and a part that the host plans.

Rows read their whole page tables, as wide as a context, and hide what lies behind them. How far a row reaches is not
read from its position but planned on the host, as FlashInfer does. Steps with chunks go to the torch backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.attention.interface import AttentionVariant, DecodeStep, StepAttention, StepRows
from minisgl_backend.attention.torch_backend import TorchAttention
from minisgl_backend.kernels.interface import HeadPreparation
from minisgl_backend.kernels.paged_kv import gather_pages, write_kv
from minisgl_backend.kvpool.paged import PagedKvPool


class PlannedAttention:
    """See RecordableAttention. Layers may have windows; no caps and no sinks."""

    def __init__(self, pool: PagedKvPool, variants: Sequence[AttentionVariant]) -> None:
        assert not any(variant.softcap or variant.sinks for variant in variants)
        self._pool = pool
        self._variants = tuple(variants)
        self._torch = TorchAttention(pool, variants)

    def begin(self, rows: StepRows) -> StepAttention:
        return self._torch.begin(rows)

    def decode_step(self, positions: Tensor, page_tables: Tensor) -> DecodeStep:
        return _PlannedStep(self._pool, self._variants, positions, page_tables, torch.zeros_like(positions))


@dataclass(frozen=True)
class _PlannedStep:
    pool: PagedKvPool
    variants: tuple[AttentionVariant, ...]
    positions: Tensor
    page_tables: Tensor
    ends: Tensor  # [rows]: how many places each row attends to, by the plan

    def refresh(self, starts: npt.NDArray[np.int64], page_tables: Tensor) -> None:
        assert page_tables.data_ptr() == self.page_tables.data_ptr() and len(page_tables) == len(starts)
        self.ends.copy_(torch.from_numpy(starts + 1))

    def begin(self) -> StepAttention:
        size = self.pool.page_size
        pages = self.page_tables.gather(1, (self.positions // size)[:, None])[:, 0]
        places = torch.arange(self.page_tables.shape[1] * size, device=self.positions.device)
        return _PlannedAttend(self, pages * size + self.positions % size, places)


@dataclass(frozen=True)
class _PlannedAttend:
    step: _PlannedStep
    new: Tensor  # [rows]: where keys and values go
    places: Tensor  # 0 … those of a whole table

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
        pages, variant, ends = self.step.pool.layer(layer), self.step.variants[layer], self.step.ends[:, None]
        write_kv(*pages, k, v, self.new)
        hidden = self.places >= ends
        if variant.window:
            hidden = hidden | (self.places < ends - variant.window)
        keys, values = (
            gather_pages(side, self.step.page_tables).masked_fill(hidden[:, :, None, None], 0.0).transpose(1, 2)
            for side in pages
        )
        rows, heads, dim = q.shape
        grouped = q.view(rows, keys.shape[1], heads // keys.shape[1], dim)
        mask = torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, -torch.inf)[:, None, None]
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=variant.scale)
        return out.reshape(rows, heads * dim)
