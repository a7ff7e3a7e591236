"""The torch attention backend: paged, grouped-query, chunks and decode rows in one step, on any device.

Rows of one token (decode rows) are grouped by length, their pages gathered side by side, and each group is one masked
scaled_dot_product_attention. Longer rows (prompt chunks) take one call each: a chunk without a prefix attends to the
step's own keys, one with a prefix gathers its pages. The group of query heads that share a KV head becomes the query
dimension of the product (decode) or a broadcast (chunks), so keys and values are never repeated in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.attention.grouping import group_by_length
from minisgl_backend.attention.interface import AttentionVariant, StepRows
from minisgl_backend.kernels.paged_kv import gather_pages, write_kv
from minisgl_backend.kvpool.paged import PagedKvPool

_GATHER_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
"""Bound on the gathered keys and values of one decode group: part of the activations' peak."""


class TorchAttention:
    """Reads and writes one pool. Holds no state between steps."""

    def __init__(self, pool: PagedKvPool, variants: Sequence[AttentionVariant]) -> None:
        """variants: of each layer."""
        self._pool = pool
        self._variants = tuple(variants)
        k_pages, _ = pool.layer(0)
        token_bytes = 2 * k_pages.shape[2] * k_pages.shape[3] * k_pages.element_size()
        self._group_limit_tokens = _GATHER_BYTES[k_pages.device.type] // token_bytes

    def begin(self, rows: StepRows) -> TorchStepAttention:
        """See AttentionBackend."""
        page_size, device = self._pool.page_size, rows.page_tables.device
        ends = rows.starts + rows.lengths
        row_begins = np.cumsum(rows.lengths) - rows.lengths
        row_of_token = np.repeat(np.arange(len(rows.lengths)), rows.lengths)
        positions = np.arange(len(row_of_token)) - (row_begins - rows.starts)[row_of_token]
        row_index = torch.from_numpy(row_of_token).to(device)
        page_index = torch.from_numpy(positions // page_size).to(device)
        offsets = torch.from_numpy(positions % page_size).to(device)
        places = rows.page_tables[row_index, page_index] * page_size + offsets

        k_dtype = self._pool.layer(0)[0].dtype
        single = np.flatnonzero(rows.lengths == 1)
        groups = []
        for members in group_by_length(ends[single].tolist(), page_size, self._group_limit_tokens):
            index = single[members]
            groups.append(_decode_group(rows.page_tables, index, row_begins[index], ends[index], page_size, k_dtype))
        chunks = []
        for row in np.flatnonzero(rows.lengths > 1).tolist():
            span = slice(int(row_begins[row]), int(row_begins[row] + rows.lengths[row]))
            chunks.append(_chunk(rows.page_tables[row], span, int(rows.starts[row]), page_size, k_dtype))
        return TorchStepAttention(self._pool, self._variants, places, tuple(groups), tuple(chunks))


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    tokens: Tensor  # [rows] int64: where the rows' tokens lie in the flat batch
    tables: Tensor  # [rows, n] int64
    mask: Tensor | None  # [rows, 1, 1, n · page_size] in the pool's dtype: 0 or -inf; None when every place counts


@dataclass(frozen=True, slots=True)
class _Chunk:
    span: slice  # of the flat batch
    table: Tensor | None  # [1, n] int64; None: no prefix, the step's own keys are all there is
    end: int  # positions the last token attends to
    mask: Tensor | None  # [length, end] in the pool's dtype: 0 or -inf; None: plain causal


@dataclass(frozen=True, slots=True)
class TorchStepAttention:
    """See StepAttention."""

    pool: PagedKvPool
    variants: tuple[AttentionVariant, ...]  # of each layer
    places: Tensor  # [tokens] int64
    groups: tuple[_DecodeGroup, ...]
    chunks: tuple[_Chunk, ...]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """See StepAttention."""
        k_pages, v_pages = self.pool.layer(layer)
        write_kv(k_pages, v_pages, k, v, self.places)
        variant = self.variants[layer]
        out = torch.empty_like(q)
        for group in self.groups:
            keys, values = gather_pages(k_pages, group.tables), gather_pages(v_pages, group.tables)
            out.index_copy_(0, group.tokens, _attend_single(q[group.tokens], keys, values, group.mask, variant.scale))
        for chunk in self.chunks:
            if chunk.table is None:
                keys, values = k[chunk.span], v[chunk.span]
            else:
                keys = gather_pages(k_pages, chunk.table)[0, : chunk.end]
                values = gather_pages(v_pages, chunk.table)[0, : chunk.end]
            out[chunk.span] = _attend_chunk(q[chunk.span], keys, values, chunk.mask, variant.scale)
        return out.flatten(1)


def _decode_group(
    page_tables: Tensor,
    rows: np.ndarray[tuple[int], np.dtype[np.int64]],
    tokens: np.ndarray[tuple[int], np.dtype[np.int64]],
    ends: np.ndarray[tuple[int], np.dtype[np.int64]],
    page_size: int,
    dtype: torch.dtype,
) -> _DecodeGroup:
    device = page_tables.device
    width = -(-int(ends.max()) // page_size)
    places = width * page_size
    mask = None
    if int(ends.min()) < places:
        hidden = torch.from_numpy(np.arange(places)[None, :] >= ends[:, None]).to(device)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
        mask = mask[:, None, None, :]
    tables = page_tables[torch.from_numpy(rows).to(device), :width]
    return _DecodeGroup(torch.from_numpy(tokens).to(device), tables, mask)


def _chunk(page_table: Tensor, span: slice, start: int, page_size: int, dtype: torch.dtype) -> _Chunk:
    length = span.stop - span.start
    end = start + length
    if start == 0:
        return _Chunk(span, None, end, None)
    device = page_table.device
    mask = torch.full((length, end), float("-inf"), dtype=dtype, device=device).triu_(start + 1)
    return _Chunk(span, page_table[None, : -(-end // page_size)], end, mask)


def _attend_single(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """q [rows, heads, d], k and v [rows, places, kv_heads, d], mask [rows, 1, 1, places] → [rows, heads, d]."""
    rows, heads, dim = q.shape
    grouped = q.view(rows, k.shape[2], heads // k.shape[2], dim)
    out = F.scaled_dot_product_attention(grouped, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale)
    return out.reshape(rows, heads, dim)


def _attend_chunk(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """q [length, heads, d], k and v [end, kv_heads, d], mask [length, end] or None for causal → [length, heads, d]."""
    length, heads, dim = q.shape
    end, kv_heads, _ = k.shape
    group = heads // kv_heads
    queries = q.view(length, kv_heads, group, dim).permute(1, 2, 0, 3)
    keys = k.transpose(0, 1).unsqueeze(1).expand(kv_heads, group, end, dim)
    values = v.transpose(0, 1).unsqueeze(1).expand(kv_heads, group, end, dim)
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale)
    return out.permute(2, 0, 1, 3).reshape(length, heads, dim)
