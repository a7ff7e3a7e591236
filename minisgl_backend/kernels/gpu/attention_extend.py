"""Attention of chunk rows over paged keys and values, in Triton: see AttentionVariant for what is computed.

A program takes a tile of queries of one row: some tokens, times all query heads of one KV head, so that keys and values
are read once for all of them. Their keys come block by block (FlashAttention-2, Dao 2023); a chunk's own keys are in
the pool as those before it are. Blocks begin at multiples of their size in the row, wherever the chunk does.

A tile of a short chunk behind a long prefix is one of few, and its keys are dealt among several programs, the parts,
whose results a second kernel puts together. How depends on the row alone.

Blocks that all queries of the tile see whole have no masks. In the others, at the edges of a window and at the end,
what is not finite must not reach who does not see it, although 0 · NaN is NaN: a broken value is replaced by zeros, and
the scores of those who see it say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.gpu.attention_softmax import LOG2_E, add_block, place_of, scores_of
from minisgl_backend.kernels.gpu.tiles import precision_of

_PART_BYTES = 128 << 20
"""Bound on what the parts of split tiles leave behind at once."""

_MOST_TILES = 65535
"""Of one launch, and most parts: the second dimension of a grid has no more."""

_JOIN_LANES = 16


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
    """Where the rows of a step stand, and their tiles. int32 or int64, on the device. See StepFields."""

    starts: Tensor  # [rows]: first position that each row computes
    lengths: Tensor  # [rows]
    token_offsets: Tensor  # [rows]: where each row's tokens begin in the flat batch
    page_tables: Tensor  # [rows, n]
    tile_rows: Tensor  # [tiles]: whose the tile's queries are
    tile_firsts: Tensor  # [tiles]: the first of them, counted in the row; `tokens` of them, up to the row's end
    split_rows: Tensor  # [s], and so on: of the tiles whose keys are dealt among several programs
    split_firsts: Tensor  # [s]
    split_offsets: Tensor  # [s + 1]
    part_tiles: Tensor  # [parts]
    batches: tuple[PartBatch, ...]  # of all parts


@dataclass(frozen=True, slots=True)
class PartBatch:
    """Split tiles whose parts are there at the same time."""

    tiles: range  # of the s
    parts: range


def batch_parts(split_offsets: Sequence[int], most_parts: int) -> tuple[PartBatch, ...]:
    """Of all tiles, in their order: no more parts than most_parts, unless one tile has more. On the host."""
    batches, first = [], 0
    for tile in range(1, len(split_offsets)):
        last = tile + 1 == len(split_offsets)
        if last or split_offsets[tile + 1] - split_offsets[first] > most_parts:
            batches.append(PartBatch(range(first, tile), range(split_offsets[first], split_offsets[tile])))
            first = tile
    return tuple(batches)


def most_parts(tile: ExtendTile, heads: int, kv_heads: int) -> int:
    """That are there at once. Their weighted values lie in fp32, and are part of the activations' peak."""
    fitting = _PART_BYTES // (_head_blocks(tile, heads, kv_heads) * tile.queries * tile.columns * 4)
    return max(min(fitting, _MOST_TILES), 1)


def _head_blocks(tile: ExtendTile, heads: int, kv_heads: int) -> int:
    blocks: int = kv_heads * triton.cdiv(heads // kv_heads, tile.heads)
    return blocks


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
    tile = extend_tile(heads, kv_heads, dim, q.element_size())
    blocks = _head_blocks(tile, heads, kv_heads)
    lanes = {"GROUP": heads // kv_heads, "DIM": dim, "QUERIES": tile.queries, "TOKENS": tile.tokens}
    lanes |= {"HEADS": tile.heads, "COLUMNS": tile.columns}

    def attend(programs: int, first: int, tiles: tuple[Tensor, Tensor], parts: tuple[Tensor, ...], **to: Any) -> None:
        _attend_tile[(blocks, programs)](
            q, k_pages, v_pages, rows.starts, rows.lengths, rows.token_offsets, rows.page_tables,
            *tiles, rows.split_offsets, rows.part_tiles, first, out, *(parts or (None, None, None)),
            q_token_stride=q.stride(0), q_head_stride=q.stride(1),
            token_stride=out.stride(0), head_stride=out.stride(1), table_stride=rows.page_tables.stride(0),
            scale=scale / softcap if softcap else scale * LOG2_E.value, softcap=softcap, window=window,
            KV_HEADS=kv_heads, PAGE_SIZE=page_size, WINDOWED=window > 0, CAPPED=softcap > 0, PRECISION=precision_of(q),
            KEYS=tile.keys, STAGES=tile.stages, SPLIT=bool(parts), num_warps=tile.warps, **lanes, **to,
        )  # fmt: skip

    tiles = len(rows.tile_rows)
    for first in range(0, tiles, _MOST_TILES):
        attend(min(tiles - first, _MOST_TILES), first, (rows.tile_rows, rows.tile_firsts), (), sinks=sinks)
    for batch in rows.batches:
        size = (len(batch.parts), blocks, tile.queries)
        parts = tuple(torch.empty(n, dtype=torch.float32, device=q.device) for n in ((*size, dim), size, size))
        attend(len(batch.parts), batch.parts.start, (rows.split_rows, rows.split_firsts), parts, sinks=None)
        _join_parts[(blocks, len(batch.tiles), triton.cdiv(tile.queries, _JOIN_LANES))](
            *parts, rows.lengths, rows.token_offsets, rows.split_rows, rows.split_firsts, rows.split_offsets,
            batch.tiles.start, batch.parts.start, sinks, out, out.stride(0), out.stride(1), LANES=_JOIN_LANES, **lanes,
        )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride", "window", "first_program"])
def _attend_tile(
    q, k_pages, v_pages, starts, lengths, token_offsets, tables, tile_rows, tile_firsts, split_offsets, part_tiles,
    first_program, target, outs, most_of, total_of, sinks,
    q_token_stride, q_head_stride, token_stride, head_stride, table_stride, scale, softcap, window,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
    QUERIES: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """TOKENS queries of one row, HEADS heads each. SPLIT: and a part of their keys, with sinks left to the join.

    first_program: how many tiles, or parts, other launches have.
    """
    tile = first_program + tl.program_id(1)
    if SPLIT:
        tile = tl.load(part_tiles + tile).to(tl.int32)
    row = tl.load(tile_rows + tile).to(tl.int64)
    first = tl.load(tile_firsts + tile).to(tl.int32)
    start, length = tl.load(starts + row).to(tl.int32), tl.load(lengths + row).to(tl.int32)
    lane = tl.arange(0, QUERIES)
    query_at, head, there = _lanes(lane, first, length, GROUP, TOKENS, HEADS)
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
    begin = 0
    whole_begin = 0  # from here to `whole_end` everybody sees everything
    whole_end = (lowest + 1) // KEYS * KEYS
    if WINDOWED:
        begin = tl.maximum(lowest - window + 1, 0) // KEYS * KEYS
        whole_end = tl.maximum(whole_end, begin)
        whole_begin = tl.minimum(tl.cdiv(tl.maximum(highest - window + 1, 0), KEYS) * KEYS, whole_end)
    stop = end
    if SPLIT:
        parts_begin = tl.load(split_offsets + tile).to(tl.int32)
        parts = tl.load(split_offsets + tile + 1).to(tl.int32) - parts_begin
        size = tl.cdiv(tl.cdiv(end - begin, KEYS), parts) * KEYS
        begin += (first_program + tl.program_id(1) - parts_begin) * size
        stop = tl.minimum(begin + size, end)
    table = tables + row * table_stride
    at_head = tl.program_id(0) // ((GROUP + HEADS - 1) // HEADS) * DIM + column
    if WINDOWED:
        most, total, out = _add_keys(
            begin, tl.minimum(whole_begin, stop), end, query, position, most, total, out, k_pages, v_pages, table,
            at_head, scale, softcap, window, KV_HEADS, DIM, PAGE_SIZE, WINDOWED, CAPPED, PRECISION, KEYS, COLUMNS, True,
            1,
        )  # fmt: skip
    most, total, out = _add_keys(
        tl.maximum(whole_begin, begin), tl.minimum(whole_end, stop), end, query, position, most, total, out, k_pages,
        v_pages, table, at_head, scale, softcap, window, KV_HEADS, DIM, PAGE_SIZE, WINDOWED, CAPPED, PRECISION, KEYS,
        COLUMNS, False, STAGES,
    )  # fmt: skip
    most, total, out = _add_keys(
        tl.maximum(whole_end, begin), stop, end, query, position, most, total, out, k_pages, v_pages, table, at_head,
        scale, softcap, window, KV_HEADS, DIM, PAGE_SIZE, WINDOWED, CAPPED, PRECISION, KEYS, COLUMNS, True, 1,
    )  # fmt: skip
    if SPLIT:
        slot = (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * QUERIES + lane
        tl.store(outs + slot[:, None] * DIM + column[None, :], out, ours)
        tl.store(most_of + slot, most)
        tl.store(total_of + slot, total)
    else:
        at = token * token_stride + head * head_stride
        tl.store(target + at[:, None] + column[None, :], (out / total[:, None]).to(target.dtype.element_ty), ours)


@triton.jit
def _lanes(lane, first, length, GROUP: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr):
    """lane: of a tile's product → its query, counted in the row, its head, and whether there is such a one."""
    blocks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    member = tl.program_id(0) % blocks * HEADS + lane % HEADS
    query_at = first + lane // HEADS
    there = (lane < TOKENS * HEADS) & (query_at < length) & (member < GROUP)
    return query_at, tl.program_id(0) // blocks * GROUP + member, there


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


@triton.jit(do_not_specialize=["first_tile", "first_part"])
def _join_parts(
    outs, most_of, total_of, lengths, token_offsets, split_rows, split_firsts, split_offsets, first_tile, first_part,
    sinks, target, token_stride, head_stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    COLUMNS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Some queries of a tile whose keys were dealt among programs."""
    tile = first_tile + tl.program_id(1)
    row = tl.load(split_rows + tile).to(tl.int64)
    lane = tl.program_id(2) * LANES + tl.arange(0, LANES)
    length = tl.load(lengths + row).to(tl.int32)
    query_at, head, there = _lanes(lane, tl.load(split_firsts + tile).to(tl.int32), length, GROUP, TOKENS, HEADS)
    if sinks is not None:
        most = tl.load(sinks + head, there, 0.0).to(tl.float32) * LOG2_E
        total = tl.where(most == float("-inf"), 0.0, 1.0)
    else:
        most = tl.full((LANES,), float("-inf"), tl.float32)
        total = tl.zeros((LANES,), tl.float32)
    out = tl.zeros((LANES, COLUMNS), tl.float32)
    column = tl.arange(0, COLUMNS)
    ours = there[:, None] & (column < DIM)[None, :]
    for part in range(tl.load(split_offsets + tile).to(tl.int32), tl.load(split_offsets + tile + 1).to(tl.int32)):
        slot = ((part - first_part).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * QUERIES + lane
        its_most = tl.load(most_of + slot, there, float("-inf"))
        after = tl.maximum(most, its_most)
        base = tl.where(after == float("-inf"), 0.0, after)
        shrink, weight = tl.exp2(most - base), tl.exp2(its_most - base)
        total = total * shrink + tl.load(total_of + slot, there, 0.0) * weight
        part_out = tl.load(outs + slot[:, None] * DIM + column[None, :], ours, 0.0)
        out = out * shrink[:, None] + part_out * weight[:, None]
        most = after
    at = (tl.load(token_offsets + row).to(tl.int64) + query_at) * token_stride + head * head_stride
    tl.store(target + at[:, None] + column[None, :], (out / total[:, None]).to(target.dtype.element_ty), ours)
