"""int8, one scale for each output channel, symmetric.

Error: |stored - weight| <= scale / 2 with scale = (largest |weight| of the row) / 127, so an output differs by at most
scale / 2 times the sum of the inputs' absolute values (LLM.int8(), Dettmers et al. 2022, without its outliers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl_backend.kernels.interface import Int8Product
from minisgl_backend.layers.quant.stored import row_blocks


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """See StoredRows. values int8 [rows, columns], scales fp32 [rows, 1]."""

    values: Tensor
    scales: Tensor

    @classmethod
    def quantise(cls, weight: Tensor) -> Int8Rows:
        """weight [rows, columns] of any floating dtype, which is left as it is."""
        blocks = [_quantise(weight[rows].float()) for rows in row_blocks(weight.shape)]
        return cls(*(torch.cat(parts) for parts in zip(*blocks, strict=True)))

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns

    def dense(self, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        return self.values[rows].float().mul_(self.scales[rows]).to(dtype)


@dataclass(frozen=True, slots=True)
class Int8Linear:
    """See LinearOp: by a kernel that reads the weights as they are stored. bias [rows]."""

    product: Int8Product
    rows: Int8Rows
    bias: Tensor | None = None

    @classmethod
    def joined(cls, product: Int8Product, parts: Sequence[Int8Rows], bias: Tensor | None) -> Int8Linear:
        """The products of `parts`, side by side in their order. Copies them, but for a single one."""
        if len(parts) == 1:
            return cls(product, parts[0], bias)
        values, scales = (torch.cat(tensors) for tensors in zip(*((it.values, it.scales) for it in parts), strict=True))
        return cls(product, Int8Rows(values, scales), bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x, self.rows.values, self.rows.scales, self.bias)


def _quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 → values, scales."""
    scales = weight.abs().amax(dim=1, keepdim=True).div_(127.0)
    steps = weight / scales.where(scales > 0, 1.0)
    return steps.round_().clamp_(-127, 127).to(torch.int8), scales
