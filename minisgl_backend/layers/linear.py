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
