"""A dense layer: the weight as the checkpoint stores it, so that a mapped file can be used in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Linear:
    """weight [out, in], bias [out] or None. x [tokens, in] → [tokens, out]."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)
