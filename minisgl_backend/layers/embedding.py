"""Token ids → vectors."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Embedding:
    """weight [vocab, hidden]. tokens [tokens] of an integer dtype → [tokens, hidden], times scale, a new tensor."""

    weight: Tensor
    scale: float = 1.0

    def __call__(self, tokens: Tensor) -> Tensor:
        vectors = F.embedding(tokens, self.weight)
        return vectors if self.scale == 1.0 else vectors.mul_(self.scale)
