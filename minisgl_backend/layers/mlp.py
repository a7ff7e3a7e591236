"""The gated MLP of Llama and its kin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from minisgl_backend.kernels.activation import GatedActivation
from minisgl_backend.layers.linear import LinearOp


class Mlp(Protocol):
    """The second half of a layer: dense, or sparse."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] → the same shape, a new tensor."""
        ...


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """See Mlp: down(activation(gate) · up). SwiGLU and GeGLU, Shazeer 2020."""

    gate_up: LinearOp  # out: gate, then up
    down: LinearOp
    activation: GatedActivation

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.activation(gate, up))
