"""What sampling launches: draws of every kind, and all that changes logits before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace as with_fields
from torch import Tensor

from minisgl_backend.kernels.gpu.penalties import Biases, Masks, Penalties, RowChanges, TokenRows, Withheld, change_rows
from minisgl_backend.kernels.gpu.sampling import sample_rows
from minisgl_backend.messages.sampling import GREEDY, Sampling
from minisgl_backend.sampling.device_columns import device_columns
from minisgl_backend.sampling.parameters import SamplingColumns

from .launches import META

HOT = Sampling(temperature=1.0, top_k=0, top_p=1.0, seed=0, sample_index=0)
SAMPLINGS = ((GREEDY,), (HOT,), (GREEDY, HOT, with_fields(HOT, top_k=40, top_p=0.9)))
"""Rows of a step take them in turn."""


def draw(logits: Tensor) -> None:
    """Tokens of each row of logits [rows, vocab], of every kind; then once more after all changes there are."""
    rows = len(logits)
    for samplings in SAMPLINGS:
        parameters = SamplingColumns.greedy(rows)
        for row in range(rows):
            parameters.put(row, samplings[row % len(samplings)])
        columns = device_columns(parameters, np.arange(rows), _upload)
        sample_rows(logits, columns)
    changed = logits.float().contiguous()
    for changes in all_changes(rows, logits.shape[1]):
        change_rows(changed, changes)
    sample_rows(changed, columns)


def all_changes(rows: int, vocab: int) -> list[RowChanges]:
    """All at once, and each alone."""
    said = TokenRows(_ints(rows, 8192), _ints(rows), _ints(rows), _ints(rows))
    wide = dict.fromkeys(("presence", "frequency", "repetition"), torch.empty(rows, dtype=torch.float64, device=META))
    pairs = 3 * rows
    whole = RowChanges(
        said,
        Biases(_ints(pairs), _ints(pairs), torch.empty(pairs, dtype=torch.float64, device=META)),
        Penalties(**wide, penalised=_ints(rows), width=4000),
        Masks(_ints(rows, -(-vocab // 32)), _ints(rows)),
        Withheld(3, _ints(pairs), _ints(pairs), _ints(pairs), _ints(pairs + 1), _ints(pairs), _ints(pairs)),
    )
    nothing = RowChanges(None, None, None, None, None)
    return [
        whole,
        replace(nothing, biases=whole.biases),
        replace(nothing, masks=whole.masks),
        replace(nothing, said=said, penalties=whole.penalties),
        replace(nothing, said=said, withheld=whole.withheld),
    ]


def _upload(arrays: Sequence[npt.NDArray[Any]]) -> list[Tensor]:
    return [torch.from_numpy(array).to(META) for array in arrays]


def _ints(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=META)
