"""Token ids → vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from minisgl_backend.kernels.interface import Kernels
from minisgl_backend.kernels.torch_kernels import TORCH_KERNELS


class EmbeddingOp(Protocol):
    """A lookup in a table, however that is kept."""

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens [tokens] of an integer dtype → [tokens, hidden], times the model's scale, a new tensor."""
        ...


@dataclass(frozen=True, slots=True)
class Embedding:
    """See EmbeddingOp. weight [vocab, hidden]."""

    weight: Tensor
    scale: float = 1.0
    kernels: Kernels = TORCH_KERNELS

    def __call__(self, tokens: Tensor) -> Tensor:
        return self.kernels.take_rows(self.weight, tokens, self.scale)

    def own(self, tokens: Tensor, first: int, rows: int) -> Tensor:
        """Of a larger table whose rows `first` … `first` + `rows` - 1 begin ours: zeros for other tokens."""
        return self.kernels.take_own_rows(self.weight, tokens, first, rows, self.scale)
