"""RMS norm with its weight."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minisgl_backend.kernels.norm import rms_norm


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """weight [hidden]. x [tokens, hidden] → the same shape."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
