"""RMS norm with its weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from minisgl_backend.kernels.interface import Kernels
from minisgl_backend.kernels.torch_kernels import TORCH_KERNELS


class HeadNorm(Protocol):
    """An RMS norm of queries or keys: of each head by itself, or over all heads."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def eps(self) -> float: ...

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size of weight] → the same shape."""
        ...


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """weight [size], in the model's dtype or in fp32 (see `rms_norm`). x [..., size] → the same shape."""

    weight: Tensor
    eps: float
    kernels: Kernels = TORCH_KERNELS

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def after_add(self, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """x, added [tokens, size] → x + added, and the norm of that."""
        return self.kernels.add_rms_norm(x, added, self.weight, self.eps)
