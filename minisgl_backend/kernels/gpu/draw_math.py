"""What the kernels of sampling share: logits as integers in their order, weights, and the times of a race.

A logit and its id are one int64, so that the best token, of equals the lowest id, is one maximum; the winner of a race
is one minimum in the same way. A NaN is above everything: a row's maximum tells whether all of it is a number.

Weights and times are the reference's (`sampling/sampler.py`, `sampling/race.py`) but for the last digits of exp and
log1p: below 2e-6 of their value.
"""

from __future__ import annotations

import triton
import triton.language as tl

MOST_PARTS = 128
"""Of a row. Where kernels look at all of them they look at so many: one machine code serves every number of rows."""

NAN_KEY = tl.constexpr(0x7FFFFFFF)
INF_KEY = tl.constexpr(0x7F800000)
LOWEST_KEY = tl.constexpr(-0x7F800001)  # of -inf
NOTHING = tl.constexpr(-(1 << 63))  # below all that pack_best makes
NEVER = tl.constexpr((1 << 63) - 1)  # above all that pack_time makes
WHOLE = tl.constexpr(float(1 << 40))  # a weight of 1 as a whole number
WORD_SCALE = tl.constexpr((1 - 2.0**-24) * 2.0**-32)


@triton.jit
def order_key(x):
    """fp32 → int32 in the same order; -0.0 is 0.0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, NAN_KEY, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def key_value(key):
    """int32 → the fp32 of that key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def pack_best(x, ids):
    """The larger, the better; of equals the lower id."""
    return (order_key(x).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def best_of(best, row, parts, PARTS: tl.constexpr):
    """best [rows, parts] of pack_best, parts ≤ PARTS → (key int32, id int32) of the row's best."""
    at = tl.arange(0, PARTS)
    best = tl.max(tl.load(best + row.to(tl.int64) * parts + at, at < parts, NOTHING))
    return (best >> 32).to(tl.int32), 0x7FFFFFFF - (best & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def weights_of(x, best, heat, floor):
    """fp32 logits → weights, the best at 1; none for what is below min_p, and for what is no number."""
    weights = tl.exp(tl.div_rn(x - best, heat))
    return tl.where((weights >= floor) & (weights <= 1.0), weights, 0.0)


@triton.jit
def whole(weights):
    """As int64, in which sums do not depend on an order."""
    return (weights * WHOLE).to(tl.int64)


@triton.jit
def pack_time(first, second, ids, weights):
    """When each token arrives, its id below: the smaller, the earlier. first, second: the row's key."""
    words = (ids.to(tl.uint32) ^ first.to(tl.uint32)) * (second.to(tl.uint32) | 1)
    words = words ^ (words >> 15)
    words = words * 0x846CA68B
    runs = weights > 0.0
    time = tl.div_rn(_minus_log1p_of_minus((words.to(tl.float32) + 0.5) * WORD_SCALE), tl.where(runs, weights, 1.0))
    packed = (time.to(tl.int32, bitcast=True).to(tl.int64) << 32) | ids.to(tl.int64)
    return tl.where(runs, packed, NEVER)


@triton.jit
def _minus_log1p_of_minus(u):
    """-log(1 - u), u in (0, 1). Winners have a small u, where a GPU's log(1 - u) has few right digits: there by the
    series of 2 artanh(u / (2 - u)).
    """
    s = tl.div_rn(u, 2.0 - u)
    square = s * s
    series = 1.0 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square * (1 / 9))))
    return tl.where(u < 0.25, 2.0 * s * series, -tl.log(1.0 - u))
