"""The tokens of a step on a GPU: see `draw.py`. The host sends what it knows and launches; it waits for nothing.

Loads Triton: imported where a GPU is there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.device.staging import Upload
from minisgl_backend.kernels.gpu.penalties import RowChanges, change_rows
from minisgl_backend.kernels.gpu.sampling import DrawColumns, sample_rows
from minisgl_backend.messages.plan import NO_TOKEN
from minisgl_backend.sampling.device_columns import device_columns
from minisgl_backend.sampling.draw import Draw, changed_rows
from minisgl_backend.sampling.masks import Rows, TokenMasks
from minisgl_backend.sampling.parameters import SamplingColumns
from minisgl_backend.sampling.row_changes import row_changes
from minisgl_backend.sampling.rules import StepRules

_BLOCK_ROWS = 128
"""Worked on at once: of 150,000 tokens they take 400 MB at most beside their logits. Bounds memory, not results."""


@dataclass(frozen=True, slots=True)
class TritonDraw:
    """See PrepareDraw."""

    upload: Upload

    def __call__(
        self,
        parameters: SamplingColumns,
        positions: Rows,
        rules: StepRules | None = None,
        masks: TokenMasks | None = None,
    ) -> Draw:
        changed, count = changed_rows(rules, masks), len(positions)
        plain = parameters.take(np.arange(count))
        plain.temperature[changed] = 0.0  # of their raw logits only whether they are finite is asked
        columns = device_columns(plain, positions, self.upload)
        blocks = []
        for block in _blocks(len(changed)):
            rows = changed[block]
            (index,) = self.upload((rows,))
            own = device_columns(parameters.take(rows), positions[rows], self.upload)
            blocks.append(_ChangedBlock(index, own, row_changes(rules, masks, rows, self.upload)))
        return _TritonDraw(columns, count, tuple(blocks))


@dataclass(frozen=True, slots=True)
class _ChangedBlock:
    """Rows whose logits are copied and changed."""

    index: Tensor  # int64
    columns: DrawColumns
    changes: RowChanges


@dataclass(frozen=True, slots=True)
class _TritonDraw:
    """See Draw."""

    columns: DrawColumns
    rows: int
    changed: tuple[_ChangedBlock, ...]

    def __call__(self, logits: Tensor) -> Tensor:
        drawn = [sample_rows(logits[block], self.columns.of(block)) for block in _blocks(self.rows)]
        tokens = drawn[0] if len(drawn) == 1 else torch.cat(drawn)
        for block in self.changed:
            own = logits.index_select(0, block.index).float()
            change_rows(own, block.changes)
            before, then = tokens.index_select(0, block.index), sample_rows(own, block.columns)
            tokens.index_copy_(0, block.index, torch.where(before == NO_TOKEN, before, then))
        return tokens


def _blocks(rows: int) -> list[slice]:
    return [slice(at, min(at + _BLOCK_ROWS, rows)) for at in range(0, rows, _BLOCK_ROWS)]
