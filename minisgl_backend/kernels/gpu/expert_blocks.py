"""Places of a sparse MLP in blocks of one expert each: what the products of kernels/gpu/moe.py go by.

A place is one of a token's top_k choices. Sorted by expert and padded to whole blocks, a block of the product has one
expert's weights to read; the tokens themselves are never moved. The idea is that of MegaBlocks (Gale et al. 2022) in
the form of vLLM's fused MoE, here without a sort and without atomics: each expert has a program, which walks over all
choices and keeps its own in their order. That is one launch for few places, two for many. Blocks are as many as there
may ever be, so that nothing depends on what the host knows of the choices, and a graph can hold it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_DIRECT_PLACES = 32  # up to here a place is a block: an expert that several chose is read again, but from the cache
_COUNTED_PLACES = 2048  # from here on each expert is counted once, instead of all by each program


@dataclass(frozen=True, slots=True)
class Blocks:
    """The places of a step in blocks of one expert each."""

    places: Tensor | None  # [blocks · size] int32: token · top_k + choice; `empty` where a block has nothing. None:
    # block b holds place b and no other
    experts: Tensor  # [blocks] of an integer dtype: whose block it is; NO_EXPERT: nobody's, its places are undefined
    size: int  # places of a block
    empty: int  # tokens · top_k: beyond every place


def sort_into_blocks(chosen: Tensor, num_experts: int, size: int) -> Blocks:
    """chosen [tokens, top_k] int64, without gaps, or NO_EXPERT, whose places are in nobody's blocks or none."""
    assert chosen.is_contiguous(), "choices lie without gaps"
    num_places, device = chosen.numel(), chosen.device
    if num_places <= _DIRECT_PLACES:
        return Blocks(None, chosen.flatten(), size, num_places)
    num_blocks = min(num_places, num_places // size + num_experts)  # who is chosen wastes less than one
    places = torch.empty(num_blocks * size, dtype=torch.int32, device=device)
    experts = torch.empty(num_blocks, dtype=torch.int32, device=device)
    step = 256 if num_places <= 256 else 1024 if num_places <= _COUNTED_PLACES else 4096  # each is compiled
    warps = 8 if step == 4096 else 4
    counts = None
    if num_places > _COUNTED_PLACES:
        counts = torch.empty(num_experts, dtype=torch.int32, device=device)
        _count[(num_experts,)](chosen, counts, num_places, STEP=step, num_warps=warps)
    bins = max(triton.next_power_of_2(num_experts + 1), 128)
    _fill_blocks[(num_experts + 1,)](
        chosen, counts, places, experts, num_places, num_blocks,
        EXPERTS=num_experts, BINS=bins, SIZE=size, STEP=step, num_warps=warps,
    )  # fmt: skip
    return Blocks(places, experts, size, num_places)


@triton.jit(do_not_specialize=["num_places"])
def _count(chosen, counts, num_places, STEP: tl.constexpr):
    """How many places one expert has."""
    expert = tl.program_id(0)
    count = tl.zeros((STEP,), tl.int32)
    for begin in range(0, num_places, STEP):
        at = begin + tl.arange(0, STEP)
        count += (tl.load(chosen + at, at < num_places, -1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(count, 0))


@triton.jit(do_not_specialize=["num_places", "num_blocks"])
def _fill_blocks(
    chosen, counts, places, experts, num_places, num_blocks,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The blocks of one expert; the last program marks those that are nobody's."""
    expert = tl.program_id(0)
    step = tl.arange(0, STEP)
    bins = tl.arange(0, BINS)
    if counts is not None:
        count = tl.load(counts + bins, bins < EXPERTS, 0)
    else:
        count = tl.zeros((BINS,), tl.int32)
        for begin in range(0, num_places, STEP):
            own = tl.load(chosen + begin + step, begin + step < num_places, -1).to(tl.int32)
            count += tl.histogram(tl.where(own < 0, EXPERTS, own), BINS)
        count = tl.where(bins < EXPERTS, count, 0)
    blocks = (count + SIZE - 1) // SIZE
    first = tl.sum(tl.where(bins < expert, blocks, 0), 0)
    end = num_blocks
    owner = -1
    if expert < EXPERTS:
        end = first + tl.sum(tl.where(bins == expert, blocks, 0), 0)
        owner = expert
    for begin in range(first, end, STEP):
        tl.store(experts + begin + step, owner, begin + step < end)
    if (expert < EXPERTS) & (first < end):
        target = places + first * SIZE
        taken = 0
        for begin in range(0, num_places, STEP):
            at = begin + step
            mine = (tl.load(chosen + at, at < num_places, -1) == expert).to(tl.int32)
            tl.store(target + taken + tl.cumsum(mine, 0) - 1, at, mine > 0)
            taken += tl.sum(mine, 0)
        rest = taken + tl.arange(0, SIZE)
        tl.store(target + rest, num_places, rest < (end - first) * SIZE)
