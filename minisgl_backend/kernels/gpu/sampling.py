"""Logits → tokens on a GPU: what `sampling/sampler.py` says, in two to four launches that the host does not wait for.

    logits ─ best ─┬──────────────────────── greedy rows ─┬─ finish ─► tokens
                   ├─ race ───────── rows without filter ─┤
                   └─ filter and race ── rows with one ───┘   (draw_filter.py)

A row is cut into parts where there are few rows, so that all of the GPU reads. Rows of another kind than a launch
serves cost it an empty program.

The tokens are the reference's, but where two come first in the race, or stand at the edge of min_p or top_p, within
the rounding of exp and log1p (see draw_math.py). top_k keeps exactly the reference's, and so do the others where exp
rounds alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.gpu.draw_filter import filter_rows
from minisgl_backend.kernels.gpu.draw_math import (
    INF_KEY,
    LOWEST_KEY,
    MOST_PARTS,
    NEVER,
    NOTHING,
    best_of,
    key_value,
    pack_best,
    pack_time,
    weights_of,
)

GREEDY, OF_ALL, FILTERED = 0, 1, 2
"""Kinds of rows."""

_OF_ALL = tl.constexpr(OF_ALL)
_FILTERED = tl.constexpr(FILTERED)
_NO_TOKEN = tl.constexpr(-1)

_BLOCK = 2048
_WARPS = 4
_PROGRAMS = 512  # a few for each multiprocessor


@dataclass(frozen=True, slots=True)
class DrawColumns:
    """How the rows of a step are drawn: a column each, on the device of the logits."""

    drawn: bool  # whether any row may not be GREEDY: told on the host
    filtered: bool  # whether any may be FILTERED
    kinds: Tensor  # int32: GREEDY, OF_ALL, FILTERED
    heats: Tensor  # fp32: temperatures, above 0 also where greedy
    floors: Tensor  # fp32: weights below it (the best is 1) do not run; 0: all do
    top_ks: Tensor  # int64; 0 or the vocabulary's size: no limit
    top_ps: Tensor  # float64; 1: no limit
    keys: Tensor  # int32 [rows, 2], see race.py

    def of(self, rows: slice) -> DrawColumns:
        """Of some rows: views."""
        tensors = (self.kinds, self.heats, self.floors, self.top_ks, self.top_ps, self.keys)
        return DrawColumns(self.drawn, self.filtered, *(column[rows] for column in tensors))


@dataclass(frozen=True, slots=True)
class Parts:
    """How rows are cut: `parts` of them, of `blocks` blocks each; the last ones may be shorter."""

    parts: int
    blocks: int


def cut_rows(rows: int, vocab: int) -> Parts:
    """A pure function of shapes."""
    blocks = triton.cdiv(vocab, _BLOCK)
    wanted = min(max(_PROGRAMS // rows, 1), blocks, MOST_PARTS)
    each = triton.cdiv(blocks, wanted)
    return Parts(triton.cdiv(blocks, each), each)


def sample_rows(logits: Tensor, columns: DrawColumns) -> Tensor:
    """logits [rows, vocab] fp32, bf16 or fp16, rows with gaps between them → tokens [rows] int64, new.

    A row with a NaN or +inf, or with nothing but -inf, gives NO_TOKEN and does not touch the others.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1 or vocab == 1, "logits of a row lie side by side"
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return tokens
    cut = cut_rows(rows, vocab)
    best, race = (torch.empty(rows, cut.parts, dtype=torch.int64, device=logits.device) for _ in range(2))
    grid, stride, size = (rows, cut.parts), logits.stride(0), cut.blocks * _BLOCK
    _best[grid](logits, best, stride, vocab, size, BLOCK=_BLOCK, num_warps=_WARPS)
    if columns.drawn:
        _race[grid](
            logits, best, columns.kinds, columns.heats, columns.floors, columns.keys, race, stride, vocab, size,
            PARTS=MOST_PARTS, BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
    if columns.filtered:
        filter_rows(logits, best, columns, race)
    _finish[(rows,)](best, race, columns.kinds, tokens, cut.parts, PARTS=MOST_PARTS, DRAWN=columns.drawn, num_warps=1)
    return tokens


@triton.jit
def _best(logits, best, stride, vocab, size, BLOCK: tl.constexpr):
    """One part of a row → best [rows, parts], as pack_best."""
    row, part = tl.program_id(0), tl.program_id(1)
    own = logits + row.to(tl.int64) * stride
    found = tl.full((BLOCK,), NOTHING, tl.int64)
    for begin in range(part * size, tl.minimum((part + 1) * size, vocab), BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        x = tl.load(own + ids, ids < vocab, 0.0).to(tl.float32)
        found = tl.maximum(found, tl.where(ids < vocab, pack_best(x, ids), NOTHING))
    tl.store(best + row.to(tl.int64) * tl.num_programs(1) + part, tl.max(found))


@triton.jit
def _race(
    logits, best, kinds, heats, floors, keys, race, stride, vocab, size, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """One part of a row that nothing filters → race [rows, parts], as pack_time."""
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    if tl.load(kinds + row) == _OF_ALL:
        own = logits + row.to(tl.int64) * stride
        best_key, _ = best_of(best, row, parts, PARTS)
        top, heat, floor = key_value(best_key), tl.load(heats + row), tl.load(floors + row)
        first, second = tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1)
        found = tl.full((BLOCK,), NEVER, tl.int64)
        for begin in range(part * size, tl.minimum((part + 1) * size, vocab), BLOCK):
            ids = begin + tl.arange(0, BLOCK)
            x = tl.load(own + ids, ids < vocab, -float("inf")).to(tl.float32)
            found = tl.minimum(found, pack_time(first, second, ids, weights_of(x, top, heat, floor)))
        tl.store(race + row.to(tl.int64) * parts + part, tl.min(found))


@triton.jit(do_not_specialize=["parts"])
def _finish(best, race, kinds, tokens, parts, PARTS: tl.constexpr, DRAWN: tl.constexpr):
    """A row's parts → its token. The race of a filtered row is in the first part alone."""
    row = tl.program_id(0)
    key, token = best_of(best, row, parts, PARTS)
    if DRAWN:
        kind, at = tl.load(kinds + row), tl.arange(0, PARTS)
        written = tl.where(kind == _OF_ALL, parts, tl.where(kind == _FILTERED, 1, 0))
        won = tl.min(tl.load(race + row.to(tl.int64) * parts + at, at < written, NEVER))
        token = tl.where(kind > 0, (won & 0x7FFFFFFF).to(tl.int32), token)
    finite = (key > LOWEST_KEY) & (key < INF_KEY)
    tl.store(tokens + row, tl.where(finite, token, _NO_TOKEN).to(tl.int64))
