"""The torch attention backend: paged, grouped-query, chunks and decode rows in one step, on any device.

Rows of one token (decode rows) are grouped by length, their pages gathered side by side, and each group is one masked
scaled_dot_product_attention. Longer rows (prompt chunks) take one call each: a chunk without a prefix attends to the
step's own keys, one with a prefix gathers its pages. The group of query heads that share a KV head becomes the query
dimension of the product (decode) or a broadcast (chunks), so keys and values are never repeated in memory.

A layer with a window gathers what its window holds, and a chunk that is longer takes several calls. Caps and sinks,
which that function does not know, go through kernels/blocked_attention.py, which gathers block by block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.attention.interface import AttentionVariant, StepRows
from minisgl_backend.attention.step_views import (
    BlockedRows,
    Chunk,
    DecodeGroup,
    StepView,
    ViewLimits,
    view_blocked_rows,
    view_rows,
)
from minisgl_backend.kernels.blocked_attention import BlockedAttention
from minisgl_backend.kernels.finite import broken_vectors
from minisgl_backend.kernels.interface import HeadPreparation
from minisgl_backend.kernels.paged_kv import gather_pages, write_kv
from minisgl_backend.kvpool.paged import PagedKvPool

_GATHER_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
"""Bound on the gathered keys and values of one decode group, and on all that a block of keys takes: part of the
activations' peak.
"""


class TorchAttention:
    """Reads and writes one pool. Holds no state between steps."""

    def __init__(self, pool: PagedKvPool, variants: Sequence[AttentionVariant]) -> None:
        """variants: of each layer."""
        self._pool = pool
        self._variants = tuple(variants)
        k_pages, _ = pool.layer(0)
        bound, elements = _GATHER_BYTES[k_pages.device.type], 2 * k_pages.shape[2] * k_pages.shape[3]
        self._limits = ViewLimits(
            page_size=pool.page_size,
            scratch_page=pool.scratch_page,
            mask_dtype=k_pages.dtype,
            group_tokens=bound // (elements * k_pages.element_size()),
            block_tokens=bound // (2 * elements * (k_pages.element_size() + 2 * 4)),  # in fp32 too; half for scores
        )

    def begin(self, rows: StepRows) -> TorchStepAttention:
        """See AttentionBackend."""
        page_size, device = self._pool.page_size, rows.page_tables.device
        row_begins = np.cumsum(rows.lengths) - rows.lengths
        row_of_token = np.repeat(np.arange(len(rows.lengths)), rows.lengths)
        positions = np.arange(len(row_of_token)) - (row_begins - rows.starts)[row_of_token]
        row_index = torch.from_numpy(row_of_token).to(device)
        page_index = torch.from_numpy(positions // page_size).to(device)
        offsets = torch.from_numpy(positions % page_size).to(device)
        places = rows.page_tables[row_index, page_index] * page_size + offsets

        views: dict[tuple[int, bool], StepView] = {}
        for kind in map(_kind, self._variants):
            if kind not in views:
                window, blocked = kind
                views[kind] = (view_blocked_rows if blocked else view_rows)(rows, window, self._limits)
        return TorchStepAttention(self._pool, self._variants, places, views)


def _kind(variant: AttentionVariant) -> tuple[int, bool]:
    """Layers of one kind share their view of a step: the window, and whether keys come block by block."""
    return variant.window, variant.sinks or variant.softcap != 0.0


@dataclass(frozen=True, slots=True)
class TorchStepAttention:
    """See StepAttention."""

    pool: PagedKvPool
    variants: tuple[AttentionVariant, ...]  # of each layer
    places: Tensor  # [tokens] int64
    views: dict[tuple[int, bool], StepView]  # by _kind

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
        if preparation is not None:
            q, k = preparation(q, k)
        k_pages, v_pages = self.pool.layer(layer)
        write_kv(k_pages, v_pages, k, v, self.places)
        variant = self.variants[layer]
        assert (sinks is not None) == variant.sinks, f"layer {layer}: sinks are given, or declared, but not both"
        view = self.views[_kind(variant)]
        out = torch.empty_like(q)
        for group in view.groups:
            out.index_copy_(0, group.tokens, _attend_group(q[group.tokens], k_pages, v_pages, group, variant.scale))
        for chunk in view.chunks:
            if chunk.table is None:
                keys, values = k[chunk.span], v[chunk.span]
            else:
                keys = gather_pages(k_pages, chunk.table)[0, : chunk.places]
                values = gather_pages(v_pages, chunk.table)[0, : chunk.places]
            _attend_chunk(q[chunk.span], keys, values, chunk, variant.scale, out[chunk.span])
        for rows in view.blocked:
            attended = _attend_blocked(q[rows.tokens], k_pages, v_pages, rows, variant, sinks)
            out.index_copy_(0, rows.tokens.flatten(), attended.flatten(0, 1))
        return out.flatten(1)


def _attend_group(q: Tensor, k_pages: Tensor, v_pages: Tensor, group: DecodeGroup, scale: float) -> Tensor:
    """q [rows, heads, d] → the same."""
    keys, values = gather_pages(k_pages, group.tables), gather_pages(v_pages, group.tables)
    if group.behind is not None:  # weight 0, and 0 · NaN is NaN
        for gathered in (keys, values):
            gathered[:, : group.behind.shape[1]].masked_fill_(group.behind, 0.0)
    return _attend_single(q, keys, values, group.mask, scale)


def _attend_chunk(q: Tensor, k: Tensor, v: Tensor, chunk: Chunk, scale: float, out: Tensor) -> None:
    """q [length, heads, d], k and v [places, kv_heads, d] → out [length, heads, d], which is mutated, and so
    are k and v if they were gathered.
    """
    if chunk.begins is None:
        for part in chunk.parts:
            out[part.queries] = _attend_part(q[part.queries], k[part.places], v[part.places], part.mask, scale)
        return
    broken = broken_vectors(k.flatten(1)) | broken_vectors(v.flatten(1))
    fill = Tensor.masked_fill if chunk.table is None else Tensor.masked_fill_  # what was gathered is ours
    k, v = (fill(x, broken[:, None], 0.0) for x in (k, v))
    for part in chunk.parts:
        out[part.queries] = _attend_part(q[part.queries], k[part.places], v[part.places], part.mask, scale)
    before = F.pad(broken[:, 0].cumsum(0), (1, 0))  # broken places before each, and before the end
    seen = before[len(k) - len(q) + 1 :] > before[chunk.begins]
    out.masked_fill_(seen[:, None, None], torch.nan)


def _attend_blocked(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, rows: BlockedRows, variant: AttentionVariant, sinks: Tensor | None
) -> Tensor:
    """q [rows, queries, heads, d] → the same."""
    attention = BlockedAttention(q, k_pages.shape[2], scale=variant.scale, softcap=variant.softcap, sinks=sinks)
    for block in rows.blocks:
        keys, values = gather_pages(k_pages, block.tables), gather_pages(v_pages, block.tables)
        attention.add(block.queries, keys, values, block.hidden)
    return attention.result()


def _attend_single(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """q [rows, heads, d], k and v [rows, places, kv_heads, d], mask [rows, 1, 1, places] → [rows, heads, d]."""
    rows, heads, dim = q.shape
    grouped = q.view(rows, k.shape[2], heads // k.shape[2], dim)
    out = F.scaled_dot_product_attention(grouped, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale)
    return out.reshape(rows, heads, dim)


def _attend_part(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """q [length, heads, d], k and v [end, kv_heads, d], mask [length, end] or None for causal → [length, heads, d]."""
    length, heads, dim = q.shape
    end, kv_heads, _ = k.shape
    group = heads // kv_heads
    queries = q.view(length, kv_heads, group, dim).permute(1, 2, 0, 3)
    keys = k.transpose(0, 1).unsqueeze(1).expand(kv_heads, group, end, dim)
    values = v.transpose(0, 1).unsqueeze(1).expand(kv_heads, group, end, dim)
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale)
    return out.permute(2, 0, 1, 3).reshape(length, heads, dim)
