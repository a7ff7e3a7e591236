"""A dense layer, and what any other form of one (quantised, packed) must do to stand in its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor


class LinearOp(Protocol):
    """One product with a weight, however that is kept. What it returns belongs to the caller."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, in] → [tokens, out] of x's dtype."""
        ...


@dataclass(frozen=True, slots=True)
class Linear:
    """See LinearOp. weight [out, in] as the checkpoint stores it, so a mapped file can be used in place; bias [out]."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedProduct(Protocol):
    """The operator `linear` of a native library; kernels/native/packed.py has the layout."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """See LinearOp. weight: packed; bias [outputs] of the same dtype, which x has too.

    A row's numbers do not depend on how many rows there are: sums run over depth in one order.
    """

    product: PackedProduct
    weight: Tensor
    outputs: int
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias, self.outputs)
