"""Rows with top_k or top_p: what is kept, found without sorting, and a race among it.

The kept tokens are all above a threshold, and of those that tie with it so many of the lowest ids. With A(t) the sum
over all tokens above t, of ones for top_k and of whole weights for top_p, the threshold is the least t with
A(t) < needed. It is found by bisection of the logits' bits in their order (the idea of FlashInfer's sampling without
sorting, and of radix selection), and not over the vocabulary but over candidates: tokens not further from the best one
than one of a few distances, the least that is certain to be enough. Where none is (flat rows, very large top_k) all
tokens are candidates: slower, and as right.

One program does a row: two passes over its logits, and what the candidates cost. Sums are of integers, so they are the
reference's whatever the order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.gpu.draw_math import (
    LOWEST_KEY,
    MOST_PARTS,
    NEVER,
    WHOLE,
    best_of,
    key_value,
    order_key,
    pack_time,
    weights_of,
    whole,
)

if TYPE_CHECKING:
    from minisgl_backend.kernels.gpu.sampling import DrawColumns

_BLOCKS = {torch.float32: 2048, torch.float16: 4096, torch.bfloat16: 4096}
"""Numbers at once. Of fp32 more than that spill registers."""
_WARPS = 16
_ZERO_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Of an fp32 that was one of these: so many of its last bits tell nothing."""

_FILTERED = tl.constexpr(2)


def filter_rows(logits: Tensor, best: Tensor, columns: DrawColumns, race: Tensor) -> None:
    """logits [rows, vocab], best [rows, parts] of pack_best → race [rows, 0] of the filtered rows, as pack_time.

    Takes 12 bytes a logit for the time being, for the largest number of candidates there can be.
    """
    (rows, vocab), parts = logits.shape, best.shape[1]
    ids, keys = (torch.empty(rows, vocab, dtype=torch.int32, device=logits.device) for _ in range(2))
    weights = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    _filter[(rows,)](
        logits, best, columns.kinds, columns.heats, columns.floors, columns.top_ks, columns.top_ps, columns.keys,
        ids, keys, weights, race, logits.stride(0), vocab, parts,
        PARTS=MOST_PARTS, SHIFT=_ZERO_BITS[logits.dtype], BLOCK=_BLOCKS[logits.dtype], num_warps=_WARPS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["parts"])
def _filter(
    logits, best, kinds, heats, floors, top_ks, top_ps, race_keys, ids, keys, weights, race, stride, vocab, parts,
    PARTS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row."""
    row = tl.program_id(0)
    if tl.load(kinds + row) == _FILTERED:
        own, begin = logits + row.to(tl.int64) * stride, row.to(tl.int64) * vocab
        ids, keys, weights = ids + begin, keys + begin, weights + begin
        best_key, _best_id = best_of(best, row, parts, PARTS)
        top, heat, floor = key_value(best_key), tl.load(heats + row), tl.load(floors + row)
        top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
        counting = (top_k > 0) & (top_k < vocab)

        cut, mass = _cut(own, vocab, top, heat, floor, counting, top_k, top_p, BLOCK)
        count = _gather(own, vocab, ids, keys, weights, cut, top, heat, floor, BLOCK)
        tl.debug_barrier()  # what other threads have written is read
        low, high = (order_key(cut) >> SHIFT).to(tl.int64) - 1, (best_key >> SHIFT).to(tl.int64)
        threshold, take = low, count.to(tl.int64)
        if counting:
            threshold, above = _search(keys, weights, count, low, high, top_k, True, SHIFT, BLOCK)
            take = top_k - above
            heavier, tie = _mass(keys, weights, count, threshold, SHIFT, BLOCK)
            mass = heavier + take * tie
        if top_p < 1.0:
            enough = _share(mass, top_p)
            threshold, above = _search(keys, weights, count, low, high, enough, False, SHIFT, BLOCK)
            _heavier, tie = _mass(keys, weights, count, threshold, SHIFT, BLOCK)
            tie = tl.maximum(tie, 1)
            take = (enough - above + tie - 1) // tie
        first, second = tl.load(race_keys + 2 * row), tl.load(race_keys + 2 * row + 1)
        won = _race_of(ids, keys, weights, count, threshold, take, first, second, SHIFT, BLOCK)
        tl.store(race + row.to(tl.int64) * parts, won)


@triton.jit
def _cut(own, vocab, top, heat, floor, counting, top_k, top_p, BLOCK: tl.constexpr):
    """→ (the logit from which on tokens are candidates; the sum of all whole weights)."""
    unit = tl.where(counting, 2.0, heat)
    cut_0, cut_1, cut_2, cut_3 = top - unit, top - 2.5 * unit, top - 5.0 * unit, top - 12.0 * unit
    zeros = tl.full((BLOCK,), 0, tl.int64)
    all_of, sum_0, sum_1, sum_2, sum_3 = zeros, zeros, zeros, zeros, zeros
    for begin in range(0, vocab, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        x = tl.load(own + ids, ids < vocab, -float("inf")).to(tl.float32)
        weights = whole(weights_of(x, top, heat, floor))
        all_of += weights
        amount = tl.where(counting, 1, weights)
        sum_0 += tl.where(x >= cut_0, amount, 0)
        sum_1 += tl.where(x >= cut_1, amount, 0)
        sum_2 += tl.where(x >= cut_2, amount, 0)
        sum_3 += tl.where(x >= cut_3, amount, 0)
    mass = tl.sum(all_of)
    needed = tl.where(counting, top_k, _share(mass, top_p))
    cut = tl.where(tl.sum(sum_3) >= needed, cut_3, -float("inf"))
    cut = tl.where(tl.sum(sum_2) >= needed, cut_2, cut)
    cut = tl.where(tl.sum(sum_1) >= needed, cut_1, cut)
    return tl.where(tl.sum(sum_0) >= needed, cut_0, cut), mass


@triton.jit
def _gather(own, vocab, ids, keys, weights, cut, top, heat, floor, BLOCK: tl.constexpr):
    """Writes all candidates, their ids ascending → how many. keys: see order_key."""
    count = tl.full((), 0, tl.int32)
    for begin in range(0, vocab, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        x = tl.load(own + token, token < vocab, float("nan")).to(tl.float32)
        stays = x >= cut
        place = count + tl.cumsum(stays.to(tl.int32), 0) - 1
        tl.store(ids + place, token, stays)
        tl.store(keys + place, order_key(x), stays)
        tl.store(weights + place, weights_of(x, top, heat, floor), stays)
        count += tl.sum(stays.to(tl.int32))
    return count


@triton.jit
def _search(keys, weights, count, low, high, needed, counting, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """→ (the least threshold with A < needed; A there), of keys without their SHIFT last bits.

    low, high: below it, and at least as large. Also ends where A is needed itself: then nothing that ties with the
    threshold is kept.
    """
    above = tl.full((), 0, tl.int64)
    while high - low > 1:
        middle = (low + high) >> 1
        found = tl.full((BLOCK,), 0, tl.int64)
        for begin in range(0, count, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            higher = tl.load(keys + at, at < count, LOWEST_KEY) > ((middle + 1) << SHIFT) - 1
            amount = (tl.load(weights + at, at < count, 0.0) * WHOLE).to(tl.int64)
            found += tl.where(higher, tl.where(counting, 1, amount), 0)
        sum_above = tl.sum(found)
        above = tl.where(sum_above <= needed, sum_above, above)
        low = tl.where(sum_above < needed, low, tl.where(sum_above == needed, middle - 1, middle))
        high = tl.where(sum_above <= needed, middle, high)
    return high, above


@triton.jit
def _mass(keys, weights, count, threshold, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """→ (the sum of whole weights above the threshold; that of each token that ties with it, 0: none does)."""
    found, tie = tl.full((BLOCK,), 0, tl.int64), tl.full((BLOCK,), 0, tl.int64)
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        key = tl.load(keys + at, at < count, LOWEST_KEY) >> SHIFT
        amount = whole(tl.load(weights + at, at < count, 0.0))
        found += tl.where(key > threshold, amount, 0)
        tie = tl.maximum(tie, tl.where(key == threshold, amount, 0))
    return tl.sum(found), tl.max(tie)


@triton.jit
def _race_of(ids, keys, weights, count, threshold, take, first, second, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Among what lies above the threshold, and the first `take` that tie with it → the winner, as pack_time."""
    won = tl.full((BLOCK,), NEVER, tl.int64)
    tied = tl.full((), 0, tl.int64)
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        key = tl.load(keys + at, at < count, LOWEST_KEY) >> SHIFT
        ties = ((at < count) & (key == threshold)).to(tl.int64)
        early = tied + tl.cumsum(ties, 0) <= take
        amount = whole(tl.load(weights + at, at < count, 0.0)).to(tl.float32)
        amount = tl.where(key > threshold, amount, tl.where((ties > 0) & early, amount, 0.0))
        won = tl.minimum(won, pack_time(first, second, tl.load(ids + at, at < count, 0), amount))
        tied += tl.sum(ties)
    return tl.min(won)


@triton.jit
def _share(mass, top_p):
    """What of a mass is enough for top_p, in whole numbers; all of it without a limit."""
    enough = tl.ceil(mass.to(tl.float64) * top_p).to(tl.int64)
    return tl.maximum(tl.where(top_p < 1.0, enough, mass), 1)
