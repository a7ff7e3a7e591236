"""Token ids → vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor


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

    def __call__(self, tokens: Tensor) -> Tensor:
        vectors = F.embedding(tokens, self.weight)
        return vectors if self.scale == 1.0 else vectors.mul_(self.scale)
