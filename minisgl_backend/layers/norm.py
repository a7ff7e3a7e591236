"""RMS norm with its weight."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minisgl_backend.kernels.norm import rms_norm


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """weight [size], in the model's dtype or in fp32 (see `rms_norm`). x [..., size] → the same shape."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
