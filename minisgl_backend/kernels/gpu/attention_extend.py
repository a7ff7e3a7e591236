"""Attention of chunk rows over paged keys and values, in Triton: see AttentionVariant for what is computed.

A program takes a tile of queries of one row: some tokens, times all query heads of one KV head, so that keys and values
are read once for all of them. Their keys come block by block (FlashAttention-2, Dao 2023); a chunk's own keys are in
the pool as those before it are. Blocks begin at multiples of their size in the row, wherever the chunk does.

Blocks that all queries of the tile see whole have no masks. In the others, at the edges of a window and at the end,
what is not finite must not reach who does not see it, although 0 · NaN is NaN: a broken value is replaced by zeros, and
the scores of those who see it say so.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.gpu.attention_decode import precision_of
from minisgl_backend.kernels.gpu.attention_softmax import LOG2_E, add_block, place_of, scores_of


@dataclass(frozen=True, slots=True)
class ExtendTile:
    """What a program computes, and what the launch is."""

    queries: int  # tokens · heads of one KV head
    tokens: int
    heads: int
    keys: int  # that meet them at once
    columns: int  # head_dim, up to a power of two
    warps: int
    stages: int  # of loads in flight


def extend_tile(heads: int, kv_heads: int, head_dim: int, item_bytes: int) -> ExtendTile:
    """Chosen by reasoning, not measured on a GPU yet; without spilled registers on those that it was compiled for."""
    columns = max(16, triton.next_power_of_2(head_dim))
    if item_bytes == 4:  # products in fp32 keep their operands in registers
        queries, keys, warps, stages = (32, 16, 4, 1) if columns <= 128 else (16, 16, 4, 1)
    elif columns <= 128:
        queries, keys, warps, stages = 128, 64, 8, 3
    else:
        queries, keys, warps, stages = 64, 32, 8, 2
    group = min(heads // kv_heads, queries)
    return ExtendTile(queries, queries // group, group, keys, columns, warps, stages)


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Where the rows of a step stand, and their tiles. int32 or int64, on the device."""

    starts: Tensor  # [rows]: first position that each row computes
    lengths: Tensor  # [rows]
    token_offsets: Tensor  # [rows]: where each row's tokens begin in the flat batch
    page_tables: Tensor  # [rows, n]
    tile_rows: Tensor  # [tiles]: whose the tile's queries are
    tile_firsts: Tensor  # [tiles]: the first of them, counted in the row; `tokens` of them, up to the row's end


def attend_extend(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    rows: ChunkRows,
    out: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """Each query of a tile attends to its row's keys, up to the one at its own position. Writes its place in `out`.

    Arguments as those of attend_decode. Tiles are those of `extend_tile`.
    """
    (_, heads, dim), (_, page_size, kv_heads, _) = q.shape, k_pages.shape
    if len(rows.tile_rows) == 0:
        return
    tile = extend_tile(heads, kv_heads, dim, q.element_size())
    head_blocks = kv_heads * triton.cdiv(heads // kv_heads, tile.heads)
    _attend_tile[(head_blocks, len(rows.tile_rows))](
        q, k_pages, v_pages, rows.starts, rows.lengths, rows.token_offsets, rows.page_tables,
        rows.tile_rows, rows.tile_firsts, sinks, out,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), rows.page_tables.stride(0),
        scale / softcap if softcap else scale * LOG2_E.value, softcap, window,
        GROUP=heads // kv_heads, KV_HEADS=kv_heads, DIM=dim, PAGE_SIZE=page_size,
        WINDOWED=window > 0, CAPPED=softcap > 0, PRECISION=precision_of(q),
        QUERIES=tile.queries, TOKENS=tile.tokens, HEADS=tile.heads, KEYS=tile.keys, COLUMNS=tile.columns,
        STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride", "window"])
def _attend_tile(
    q, k_pages, v_pages, starts, lengths, token_offsets, tables, tile_rows, tile_firsts, sinks, target,
    q_token_stride, q_head_stride, token_stride, head_stride, table_stride, scale, softcap, window,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
    QUERIES: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """TOKENS queries of one row, HEADS heads each."""
    row = tl.load(tile_rows + tl.program_id(1)).to(tl.int64)
    first = tl.load(tile_firsts + tl.program_id(1)).to(tl.int32)
    start, length = tl.load(starts + row).to(tl.int32), tl.load(lengths + row).to(tl.int32)
    blocks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(0) // blocks
    lane = tl.arange(0, QUERIES)
    member = tl.program_id(0) % blocks * HEADS + lane % HEADS
    query_at = first + lane // HEADS
    there = (lane < TOKENS * HEADS) & (query_at < length) & (member < GROUP)
    head = kv_head * GROUP + member
    token = tl.load(token_offsets + row).to(tl.int64) + query_at
    column = tl.arange(0, COLUMNS)
    ours = there[:, None] & (column < DIM)[None, :]
    at_query = token * q_token_stride + head * q_head_stride
    query = tl.load(q + at_query[:, None] + column[None, :], ours, 0.0)

    if sinks is not None:  # a key seen already: it has a score, and adds nothing to the values
        most = tl.load(sinks + head, there, 0.0).to(tl.float32) * LOG2_E
        total = tl.where(most == float("-inf"), 0.0, 1.0)
    else:
        most = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
    out = tl.zeros((QUERIES, COLUMNS), tl.float32)

    position = start + query_at
    lowest = start + first
    highest = start + tl.minimum(first + TOKENS, length) - 1
    end = highest + 1
    whole_begin = 0  # from here to `whole_end` everybody sees everything
    whole_end = (lowest + 1) // KEYS * KEYS
    table = tables + row * table_stride
    at_head = kv_head * DIM + column
    if WINDOWED:
        begin = tl.maximum(lowest - window + 1, 0) // KEYS * KEYS
        whole_begin = tl.cdiv(tl.maximum(highest - window + 1, 0), KEYS) * KEYS
        whole_end = tl.maximum(whole_end, begin)
        whole_begin = tl.minimum(whole_begin, whole_end)
        most, total, out = _add_keys(
            begin, whole_begin, end, query, position, most, total, out, k_pages, v_pages, table, at_head, scale,
            softcap, window, KV_HEADS, DIM, PAGE_SIZE, WINDOWED, CAPPED, PRECISION, KEYS, COLUMNS, True, 1,
        )  # fmt: skip
    most, total, out = _add_keys(
        whole_begin, whole_end, end, query, position, most, total, out, k_pages, v_pages, table, at_head, scale,
        softcap, window, KV_HEADS, DIM, PAGE_SIZE, WINDOWED, CAPPED, PRECISION, KEYS, COLUMNS, False, STAGES,
    )  # fmt: skip
    most, total, out = _add_keys(
        whole_end, end, end, query, position, most, total, out, k_pages, v_pages, table, at_head, scale,
        softcap, window, KV_HEADS, DIM, PAGE_SIZE, WINDOWED, CAPPED, PRECISION, KEYS, COLUMNS, True, 1,
    )  # fmt: skip
    at = token * token_stride + head * head_stride
    tl.store(target + at[:, None] + column[None, :], (out / total[:, None]).to(target.dtype.element_ty), ours)


@triton.jit
def _add_keys(
    begin, stop, end, query, position, most, total, out, k_pages, v_pages, table, at_head, scale, softcap, window,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, EDGE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The keys at `begin` up to `stop`, in whole blocks; there are none from `end` on. EDGE: some see only some."""
    within = tl.arange(0, COLUMNS) < DIM
    for at in tl.range(begin, stop, KEYS, num_stages=STAGES):
        key = at + tl.arange(0, KEYS)
        inside = key < end
        place = place_of(table, key, inside, PAGE_SIZE)
        offset = place[:, None] * (KV_HEADS * DIM) + at_head[None, :]
        if EDGE:
            mask = inside[:, None] & within[None, :]
        else:
            mask = within[None, :]
        score = scores_of(query, tl.load(k_pages + offset, mask, 0.0), scale, softcap, CAPPED, PRECISION)
        values = tl.load(v_pages + offset, mask, 0.0)
        if EDGE:
            sound = tl.min((tl.abs(values.to(tl.float32)) < float("inf")).to(tl.int32), 1) != 0
            values = tl.where(sound[:, None], values, 0.0)
            seen = key[None, :] <= position[:, None]
            if WINDOWED:
                seen &= key[None, :] > position[:, None] - window
            score = tl.where(sound[None, :], score, float("nan"))
            score = tl.where(seen, score, float("-inf"))
        most, total, out = add_block(score, values, most, total, out, PRECISION)
    return most, total, out
