"""One uniform number per sampled token, from a counter-based hash: no generator, no state, nothing shared in a batch.

splitmix64's finaliser, Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators".
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniform(
    seeds: npt.NDArray[np.uint64], sample_indices: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """Each [rows] → [rows] in [0, 1), multiples of 2**-53. Row i depends on its three numbers alone.

    positions: index of the sampled token in its sequence, the prompt included.
    """
    state = _mix(seeds + _GOLDEN)
    state = _mix(state ^ (sample_indices + _GOLDEN))
    state = _mix(state ^ (positions + _GOLDEN))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))
