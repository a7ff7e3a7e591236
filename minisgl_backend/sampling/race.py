"""The chance in a draw: an exponential race among tokens, run on a counter-based hash. No generator, no state, nothing
shared in a batch.

Each token runs for a time E / weight, E exponential and its own; the first wins, with probability weight / sum of the
weights. (Gumbel 1954; Efraimidis and Spirakis 2006, "Weighted random sampling with a reservoir"; as the Gumbel-max
trick: Maddison, Tarlow and Minka 2014, "A* Sampling".) Logits come out of other kernels in other batches and differ in
their last digits. A race notices only where its first two are that close; a running sum, inverted, adds the differences
of all the tokens before the one that it finds.

    seed, sample index, position ── splitmix64 ──► key of the row ─┬─ hash ──► E of each token
                                                              id ──┘
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

_MIX_ID = 0x846CA68B - (1 << 32)  # as an int32
_NEARLY_2_TO_MINUS_32 = (1 - 2.0**-24) * 2.0**-32  # the largest word, in fp32 2**32, stays below 1


def row_keys(
    seeds: npt.NDArray[np.uint64], sample_indices: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]
) -> npt.NDArray[np.int32]:
    """Each [rows] → [rows, 2]. Row i depends on its three numbers alone.

    positions: index of the sampled token in its sequence, the prompt included.
    splitmix64's finaliser, Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators".
    """
    state = _mix(seeds + _GOLDEN)
    state = _mix(state ^ (sample_indices + _GOLDEN))
    state = _mix(state ^ (positions + _GOLDEN))
    return state.astype("<u8").view("<i4").reshape(-1, 2)


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))


def winners(keys: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """keys [rows, 2] int32, ids [rows or 1, n] int32, weights [rows, n] fp32 → columns of the winners [rows] int64.

    weights: 0 … 2**40, not all of a row 0; a token of weight 0 never wins. A factor that all weights of a row share
    changes nothing, nor does the order of columns; but of equal times the first wins. Words have 32 bits, so E is not
    below 2**-33: tokens below 2**-33 of the sum are drawn too rarely, those below 2**-37 of the best one never.
    """
    behind = _words(keys, ids).view(torch.uint32).to(torch.float32).add_(0.5).mul_(-_NEARLY_2_TO_MINUS_32).log1p_()
    return behind.div_(weights).max(dim=-1).indices  # its argmax would be three times as slow on a CPU


def _words(keys: Tensor, ids: Tensor) -> Tensor:
    """32 random bits for each id, [rows, n] int32: products of int32 wrap.

    The first product is by an odd number of the row's own (Dietzfelbinger et al. 1997, "A reliable randomized algorithm
    for the closest-pair problem"): whatever two ids differ in, in other rows it makes another difference. What follows
    is half of a finaliser like murmur3's, constants of Wellons 2018, "Prospecting for Hash Functions" (lowbias32). With
    fixed factors only, neighbouring ids were measurably not independent (tests/unit/sampling/test_race.py).
    """
    words = (ids ^ keys[:, :1]).mul_(keys[:, 1:] | 1)
    words ^= (words >> 15).bitwise_and_((1 << 17) - 1)  # a logical shift
    return words.mul_(_MIX_ID)
