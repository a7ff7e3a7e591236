"""The one decoder: every supported model is this file under another ModelSpec.

Pre-norm residual blocks (LLaMA, Touvron et al. 2023) with what the families add: norms of the blocks' outputs, norms
of queries and keys, windows, several ways to rotate, experts, capped logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl_backend.attention.interface import StepAttention
from minisgl_backend.layers.attention import SelfAttention
from minisgl_backend.layers.embedding import EmbeddingOp
from minisgl_backend.layers.linear import LinearOp
from minisgl_backend.layers.mlp import Mlp
from minisgl_backend.layers.norm import RmsNorm
from minisgl_backend.layers.rotary import RotaryTable, Rotation
from minisgl_backend.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Block:
    """x → x + after(inner(before(x))), in its two parts, around attention or MLP. None: there is no such norm."""

    before: RmsNorm | None
    after: RmsNorm | None

    def enter(self, x: Tensor) -> Tensor:
        return x if self.before is None else self.before(x)

    def leave(self, x: Tensor, inner: Tensor) -> Tensor:
        return x + (inner if self.after is None else self.after(inner))


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and MLP, each between its norms and around a residual."""

    rope: int | None  # which of the step's rotations; None: none
    attention_block: Block
    attention: SelfAttention
    mlp_block: Block
    mlp: Mlp

    def __call__(self, x: Tensor, rotations: tuple[Rotation, ...], attention: StepAttention) -> Tensor:
        rotation = None if self.rope is None else rotations[self.rope]
        x = self.attention_block.leave(x, self.attention(self.attention_block.enter(x), rotation, attention))
        return self.mlp_block.leave(x, self.mlp(self.mlp_block.enter(x)))


@dataclass(frozen=True, slots=True)
class Decoder:
    """See Model."""

    spec: ModelSpec
    embedding: EmbeddingOp
    rotaries: tuple[RotaryTable, ...]  # of spec.ropes
    layers: tuple[DecoderLayer, ...]
    norm: RmsNorm
    lm_head: LinearOp

    def forward(self, tokens: Tensor, positions: Tensor, attention: StepAttention, sampled: Tensor) -> Tensor:
        """See Model."""
        return self.head(self.hidden(tokens, positions, attention)[sampled])

    def hidden(self, tokens: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        """See Model."""
        x = self.embedding(tokens)
        rotations = tuple(rotary.at(positions) for rotary in self.rotaries)
        for layer in self.layers:
            x = layer(x, rotations, attention)
        return x

    def head(self, hidden: Tensor) -> Tensor:
        """See Model."""
        logits = self.lm_head(self.norm(hidden))
        cap = self.spec.final_softcap
        return torch.tanh(logits / cap) * cap if cap else logits
