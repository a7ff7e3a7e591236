"""The one decoder: every supported model is this file under another ModelSpec.

Pre-norm residual blocks (LLaMA, Touvron et al. 2023) with what the families add: norms of the blocks' outputs, norms
of queries and keys, windows, several ways to rotate, experts, capped logits.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minisgl_backend.attention.interface import StepAttention
from minisgl_backend.kernels.interface import Kernels, Rotation
from minisgl_backend.kernels.torch_kernels import TORCH_KERNELS
from minisgl_backend.layers.attention import SelfAttention
from minisgl_backend.layers.embedding import EmbeddingOp
from minisgl_backend.layers.linear import LinearOp
from minisgl_backend.layers.mlp import Mlp
from minisgl_backend.layers.norm import RmsNorm
from minisgl_backend.layers.rotary import RotaryTable
from minisgl_backend.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Block:
    """x → x + after(inner(before(x))), in its two parts, around attention or MLP. None: there is no such norm.

    The sum of a block is taken where the next one enters, together with that one's norm.
    """

    before: RmsNorm | None
    after: RmsNorm | None
    kernels: Kernels = TORCH_KERNELS

    def enter(self, x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        """added: what the last block adds to x; None: nothing → their sum, and what goes into this block."""
        if added is None:
            return x, x if self.before is None else self.before(x)
        if self.before is not None:
            return self.before.after_add(x, added)
        total = self.kernels.add(x, added)
        return total, total

    def leave(self, inner: Tensor) -> Tensor:
        """What is to be added."""
        return inner if self.after is None else self.after(inner)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and MLP, each between its norms and around a residual."""

    rope: int | None  # which of the step's rotations; None: none
    attention_block: Block
    attention: SelfAttention
    mlp_block: Block
    mlp: Mlp

    def __call__(
        self, x: Tensor, added: Tensor | None, rotations: tuple[Rotation, ...], attention: StepAttention
    ) -> tuple[Tensor, Tensor]:
        """x, and what is still to be added to it, before the layer → the same behind it."""
        rotation = None if self.rope is None else rotations[self.rope]
        x, inner = self.attention_block.enter(x, added)
        added = self.attention_block.leave(self.attention(inner, rotation, attention))
        x, inner = self.mlp_block.enter(x, added)
        return x, self.mlp_block.leave(self.mlp(inner))


@dataclass(frozen=True, slots=True)
class Decoder:
    """See Model."""

    spec: ModelSpec
    embedding: EmbeddingOp
    rotaries: tuple[RotaryTable, ...]  # of spec.ropes
    layers: tuple[DecoderLayer, ...]
    norm: RmsNorm
    lm_head: LinearOp
    kernels: Kernels = TORCH_KERNELS

    def forward(self, tokens: Tensor, positions: Tensor, attention: StepAttention, sampled: Tensor) -> Tensor:
        """See Model."""
        return self.head(self.kernels.take_rows(self.hidden(tokens, positions, attention), sampled))

    def hidden(self, tokens: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        """See Model."""
        x, added = self.embedding(tokens), None
        rotations = tuple(rotary.at(positions) for rotary in self.rotaries)
        for layer in self.layers:
            x, added = layer(x, added, rotations, attention)
        return x if added is None else self.kernels.add(x, added)

    def head(self, hidden: Tensor) -> Tensor:
        """See Model."""
        logits = self.lm_head(self.norm(hidden))
        cap = self.spec.final_softcap
        return self.kernels.softcap(logits, cap) if cap else logits
