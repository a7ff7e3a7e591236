"""int4 in groups of 32 along the input, each with a scale and a minimum (stored as in GPTQ and AWQ, rounded plainly).

Error: |stored - weight| <= scale * 0.51 with scale = (largest - smallest weight of the group) / 15: half a step, and
what rounding scale and minimum to fp16 adds. An output differs by at most the sum of these times the inputs' absolute
values. Why with a minimum and not symmetric: docs/models.md, "Weights, GGUF and quantisation".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl_backend.layers.quant.stored import row_blocks

GROUP = 32
"""Columns that share a scale."""


@dataclass(frozen=True, slots=True)
class Int4Rows:
    """See StoredRows. values uint8 [rows, columns / 2]: two neighbours, the first in the low bits. scales, minima fp16
    [rows, columns / 32, 1].
    """

    values: Tensor
    scales: Tensor
    minima: Tensor

    @classmethod
    def quantise(cls, weight: Tensor) -> Int4Rows:
        """weight [rows, columns] of any floating dtype, which is left as it is; columns are a multiple of 32."""
        blocks = [_quantise(weight[rows].float()) for rows in row_blocks(weight.shape)]
        return cls(*(torch.cat(parts) for parts in zip(*blocks, strict=True)))

    @property
    def shape(self) -> tuple[int, int]:
        rows, half = self.values.shape
        return rows, 2 * half

    def dense(self, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        values = self.values[rows]
        steps = torch.stack((values & 15, values >> 4), dim=-1).reshape(len(values), -1, GROUP).float()
        return steps.mul_(self.scales[rows].float()).add_(self.minima[rows].float()).flatten(1).to(dtype)


def _quantise(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 → values, scales, minima."""
    groups = weight.reshape(len(weight), -1, GROUP)
    minima = groups.amin(dim=2, keepdim=True).half()
    scales = ((groups.amax(dim=2, keepdim=True) - minima.float()) / 15.0).half()
    divisors = scales.float()
    steps = (groups - minima.float()).div_(divisors.where(divisors > 0, 1.0))
    steps = steps.round_().clamp_(0, 15).to(torch.uint8).flatten(1)
    return steps[:, 0::2] | (steps[:, 1::2] << 4), scales, minima
