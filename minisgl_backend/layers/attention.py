"""Self-attention around a backend: project, rotate, attend over the pages, project back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minisgl_backend.attention.interface import StepAttention
from minisgl_backend.kernels.rotary import apply_rotary
from minisgl_backend.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """x [tokens, hidden] → the same shape. Mutates the KV pool behind `attention`."""

    layer: int  # of the KV pool
    head_dim: int
    q: Linear  # out: heads · head_dim
    k: Linear  # out: kv_heads · head_dim
    v: Linear
    o: Linear

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attention: StepAttention) -> Tensor:
        """cos, sin: from RotaryTable.at the tokens' positions. attention: of this step."""
        shape = (x.shape[0], -1, self.head_dim)
        q = apply_rotary(self.q(x).view(shape), cos, sin)
        k = apply_rotary(self.k(x).view(shape), cos, sin)
        return self.o(attention.attend(self.layer, q, k, self.v(x).view(shape)))
