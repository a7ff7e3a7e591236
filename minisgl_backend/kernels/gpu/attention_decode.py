"""Attention of decode rows over paged keys and values, in Triton: see AttentionVariant for what is computed.

The keys that a row sees are cut into splits, which several programs work through at the same time, and a second kernel
puts their results together (Flash-Decoding, Dao et al. 2023). All query heads of one KV head are the rows of one
product, so that keys and values are read once.

How a row is cut depends on the number of its keys alone, and never on who works through the splits: a row gets the very
same numbers whatever is in the batch beside it, and in a graph made for more rows and longer contexts.

No value is read by the host, and the grid follows from shapes, so that a graph can hold the launches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.gpu.attention_softmax import LOG2_E, add_block, place_of, scores_of
from minisgl_backend.kernels.gpu.tiles import precision_of

_LEAST_SPLIT_TOKENS = 256
"""Shorter splits cost more than they bring: each writes the weighted values of its queries in fp32, for the join."""

_PROGRAMS = 2048
"""Programs that keep a GPU busy to the end; beyond these one program takes several splits."""

_ROW_PROGRAMS = 256
"""Programs that a long row alone is spread over: two for each multiprocessor of a large GPU."""


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """What a program computes, and what the launch is."""

    heads: int  # query heads of one KV head that go through a product together; at least 16, as tensor cores ask for
    keys: int  # that meet them at once
    columns: int  # head_dim, up to a power of two
    splits: int  # most of a row: depends on the model alone, as the order of sums does
    warps: int
    stages: int  # of loads in flight


def decode_tile(heads: int, kv_heads: int, head_dim: int, item_bytes: int) -> DecodeTile:
    """Chosen by reasoning, not measured on a GPU yet: keys and values of all stages leave room for two programs."""
    columns = max(16, triton.next_power_of_2(head_dim))
    group = triton.next_power_of_2(heads // kv_heads)
    keys = max(16, min(64, 16384 // (columns * item_bytes)))
    splits = min(64, max(8, triton.next_power_of_2(_ROW_PROGRAMS // kv_heads)))
    return DecodeTile(max(16, min(64, group)), keys, columns, splits, warps=4, stages=5)


def split_programs(rows: int, heads: int, most_splits: int) -> int:
    """Programs among which the splits of each row are dealt. heads: blocks of heads in a row."""
    wanted: int = triton.next_power_of_2(triton.cdiv(_PROGRAMS, max(rows * heads, 1)))
    return max(1, min(wanted, most_splits))


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Where the decode rows of a step stand. int32 or int64, on the device."""

    rows: Tensor  # [d]: indices of the decode rows
    tokens: Tensor  # [d]: where their tokens lie in the flat batch
    starts: Tensor  # [all rows of the step]: the position that each row computes
    page_tables: Tensor  # [all rows, n]


def attend_decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    rows: DecodeRows,
    out: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """Each decode row attends to its own keys, up to the one at its position. Writes the rows' tokens in `out`.

    q, out [tokens, heads, head_dim], no gaps in vectors, of the pages' dtype: bf16, fp16 or fp32. k_pages, v_pages
    [pages, page_size, kv_heads, head_dim] without gaps. scale, window, softcap: as in AttentionVariant; sinks [heads].
    What a row does not see is not read: not a page behind its window, nor a place behind its last token.
    """
    count, (_, heads, dim), (_, page_size, kv_heads, _) = len(rows.rows), q.shape, k_pages.shape
    if count == 0:
        return
    tile = decode_tile(heads, kv_heads, dim, q.element_size())
    head_blocks = kv_heads * triton.cdiv(heads // kv_heads, tile.heads)
    keys = rows.page_tables.shape[1] * page_size
    keys = min(keys, window) if window else keys
    splits = min(tile.splits, triton.cdiv(keys, _LEAST_SPLIT_TOKENS))
    outs = torch.empty(count, heads, splits, dim, dtype=torch.float32, device=q.device)
    most, total = (torch.empty(count, heads, splits, dtype=torch.float32, device=q.device) for _ in range(2))
    shape = {
        "GROUP": heads // kv_heads, "DIM": dim, "WINDOWED": window > 0,
        "SPLITS": tile.splits, "LEAST": _LEAST_SPLIT_TOKENS, "COLUMNS": tile.columns,
    }  # fmt: skip
    _attend_splits[(count, head_blocks, split_programs(count, head_blocks, splits))](
        q, k_pages, v_pages, rows.rows, rows.tokens, rows.starts, rows.page_tables, outs, most, total,
        q.stride(0), q.stride(1), rows.page_tables.stride(0), splits,
        scale / softcap if softcap else scale * LOG2_E.value, softcap, window,
        **shape, KV_HEADS=kv_heads, PAGE_SIZE=page_size, CAPPED=softcap > 0, PRECISION=precision_of(q),
        HEADS=tile.heads, KEYS=tile.keys, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    _join_splits[(count, heads)](
        outs, most, total, rows.rows, rows.tokens, rows.starts, sinks, out, out.stride(0), out.stride(1),
        splits, window,
        **shape, BLOCK=min(tile.splits, 16), num_warps=4,
    )  # fmt: skip


@triton.jit
def _seen(start, window, WINDOWED: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr):
    """The row at position `start` → its first key, how many there are, and how many each split has."""
    count = start + 1
    if WINDOWED:
        count = tl.minimum(count, window)
    size = tl.cdiv(tl.cdiv(count, SPLITS), LEAST) * LEAST
    return start + 1 - count, count, size


@triton.jit(do_not_specialize=["table_stride", "splits", "window"])
def _attend_splits(
    q, k_pages, v_pages, rows, tokens, starts, tables, outs, most_of, total_of,
    q_token_stride, q_head_stride, table_stride, splits, scale, softcap, window,
    GROUP: tl.constexpr, DIM: tl.constexpr, WINDOWED: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
    COLUMNS: tl.constexpr, KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Some splits of one row, for some query heads of one KV head."""
    index = tl.program_id(0)
    row = tl.load(rows + index).to(tl.int64)
    token = tl.load(tokens + index).to(tl.int64)
    first, count, size = _seen(tl.load(starts + row).to(tl.int32), window, WINDOWED, SPLITS, LEAST)
    blocks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // blocks
    member = tl.program_id(1) % blocks * HEADS + tl.arange(0, HEADS)
    head = kv_head * GROUP + member
    column = tl.arange(0, COLUMNS)
    there, within = member < GROUP, column < DIM
    ours = there[:, None] & within[None, :]
    query = tl.load(q + token * q_token_stride + head[:, None] * q_head_stride + column[None, :], ours, 0.0)
    table = tables + row * table_stride
    at_head = kv_head * DIM + column
    for split in range(tl.program_id(2), tl.cdiv(count, size), tl.num_programs(2)):
        begin = first + split * size
        end = tl.minimum(begin + size, first + count)
        most = tl.full((HEADS,), float("-inf"), tl.float32)
        total = tl.zeros((HEADS,), tl.float32)
        out = tl.zeros((HEADS, COLUMNS), tl.float32)
        for at in tl.range(begin, end, KEYS):
            position = at + tl.arange(0, KEYS)
            inside = position < end
            place = place_of(table, position, inside, PAGE_SIZE)
            offset = place[:, None] * (KV_HEADS * DIM) + at_head[None, :]
            mask = inside[:, None] & within[None, :]
            score = scores_of(query, tl.load(k_pages + offset, mask, 0.0), scale, softcap, CAPPED, PRECISION)
            score = tl.where(inside[None, :], score, float("-inf"))
            values = tl.load(v_pages + offset, mask, 0.0)
            most, total, out = add_block(score, values, most, total, out, PRECISION)
        slot = (index.to(tl.int64) * (KV_HEADS * GROUP) + head) * splits + split
        tl.store(outs + slot[:, None] * DIM + column[None, :], out, ours)
        tl.store(most_of + slot, most, there)
        tl.store(total_of + slot, total, there)


@triton.jit(do_not_specialize=["splits", "window"])
def _join_splits(
    outs, most_of, total_of, rows, tokens, starts, sinks, target, token_stride, head_stride, splits, window,
    GROUP: tl.constexpr, DIM: tl.constexpr, WINDOWED: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of one row. Splits that it has not are not read: nobody wrote them."""
    index, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + index).to(tl.int64)
    token = tl.load(tokens + index).to(tl.int64)
    _, count, size = _seen(tl.load(starts + row).to(tl.int32), window, WINDOWED, SPLITS, LEAST)
    used = tl.cdiv(count, size)
    slot = (index.to(tl.int64) * tl.num_programs(1) + head) * splits
    every = tl.arange(0, SPLITS)
    most = tl.load(most_of + slot + every, every < used, float("-inf"))
    highest = tl.max(most, 0)
    if sinks is not None:  # a key that has a score and adds nothing to the values
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        highest = tl.maximum(highest, sink)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.load(total_of + slot + every, every < used, 0.0) * tl.exp2(most - base), 0)
    if sinks is not None:
        total += tl.exp2(sink - base)
    column = tl.arange(0, COLUMNS)
    within = column < DIM
    joined = tl.zeros((COLUMNS,), tl.float32)
    for begin in range(0, used, BLOCK):
        split = begin + tl.arange(0, BLOCK)
        weight = tl.exp2(tl.load(most_of + slot + split, split < used, float("-inf")) - base)
        mask = (split < used)[:, None] & within[None, :]
        part = tl.load(outs + (slot + split)[:, None] * DIM + column[None, :], mask, 0.0)
        joined += tl.sum(part * weight[:, None], 0)
    at = target + token * token_stride + head * head_stride + column
    tl.store(at, (joined / total).to(target.dtype.element_ty), within)
