"""Token ids → vectors."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Embedding:
    """weight [vocab, hidden]. tokens [tokens] of an integer dtype → [tokens, hidden]."""

    weight: Tensor

    def __call__(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)
