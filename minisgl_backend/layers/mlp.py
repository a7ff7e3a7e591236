"""Llama's gated MLP."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minisgl_backend.kernels.activation import silu_mul
from minisgl_backend.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """x [tokens, hidden] → down(silu(gate(x)) · up(x)), the same shape."""

    gate: Linear
    up: Linear
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(silu_mul(self.gate(x), self.up(x)))
