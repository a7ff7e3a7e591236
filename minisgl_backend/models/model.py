"""What the runner needs of a model, whatever its architecture."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from minisgl_backend.attention.interface import StepAttention
from minisgl_backend.models.spec import ModelSpec


class Model(Protocol):
    """Weights of one rank and how a step goes through them."""

    @property
    def spec(self) -> ModelSpec: ...

    def forward(self, tokens: Tensor, positions: Tensor, attention: StepAttention, sampled: Tensor) -> Tensor:
        """One step.

        tokens, positions [tokens]: integers, rows one after another. attention: of this step. sampled [n] int64:
        which tokens go through the LM head → logits [n, vocab] in the model's dtype, a new tensor.
        """
        ...

    def hidden(self, tokens: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        """`forward` up to the LM head, for all tokens → [tokens, hidden size], a new tensor."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """Some rows of what `hidden` gave → logits [n, vocab]. forward(…, sampled) = head(hidden(…)[sampled])."""
        ...
