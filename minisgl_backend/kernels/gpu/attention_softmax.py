"""What both attention kernels do with a tile of scores: the softmax of keys that come block by block.

One pass with a running maximum (Milakov and Gimelshein 2018), in powers of two. Functions of kernels, not kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def place_of(table, position, mask, PAGE_SIZE: tl.constexpr):
    """position, mask [keys], the row's page table → int64 [keys]: page · PAGE_SIZE + offset. Hidden ones: no matter."""
    page = tl.load(table + position // PAGE_SIZE, mask, 0)
    return page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE


@triton.jit
def scores_of(query, keys, scale, softcap, CAPPED: tl.constexpr, PRECISION: tl.constexpr):
    """query [queries, columns], keys [keys, columns] → fp32 [queries, keys], times log2(e). scale: divided by softcap
    if there is one, else times log2(e).
    """
    score = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale
    if CAPPED:  # tanh(x) = 2 · sigmoid(2x) - 1
        score = (2 * tl.sigmoid(2 * score) - 1) * (softcap * LOG2_E)
    return score


@triton.jit
def add_block(score, values, most, total, out, PRECISION: tl.constexpr):
    """score [queries, keys], -inf where hidden; values [keys, columns], finite where a score is -inf. → the running
    maximum and sum [queries] and the weighted values [queries, columns], with these keys.

    A maximum that is NaN, or drops one, does no harm: the weight of a score that is NaN is NaN.
    """
    after = tl.maximum(most, tl.max(score, 1))
    base = tl.where(after == float("-inf"), 0.0, after)  # nothing was seen yet, and -inf less -inf is not a number
    weight = tl.exp2(score - base[:, None])
    shrink = tl.exp2(most - base)
    total = total * shrink + tl.sum(weight, 1)
    out = out * shrink[:, None]
    return after, total, tl.dot(weight.to(values.dtype), values, out, input_precision=PRECISION)
