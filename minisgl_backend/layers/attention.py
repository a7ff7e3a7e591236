"""Self-attention around a backend: project, normalise, rotate, attend over the pages, project back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl_backend.attention.interface import StepAttention
from minisgl_backend.kernels.interface import HeadPreparation, Kernels, Rotation
from minisgl_backend.kernels.torch_kernels import TORCH_KERNELS
from minisgl_backend.layers.linear import LinearOp
from minisgl_backend.layers.norm import HeadNorm


@dataclass(frozen=True, slots=True)
class QkNorms:
    """RMS norms of queries and keys (Henry et al. 2020): of each head by itself, or over all heads at once (OLMo 2)."""

    q: HeadNorm
    k: HeadNorm
    each_head: bool


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """x [tokens, hidden] → the same shape. Mutates the KV pool behind `attention`."""

    layer: int  # of the KV pool
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: LinearOp  # out: q, then k, then v
    o: LinearOp
    norms: QkNorms | None = None
    sinks: Tensor | None = None  # see StepAttention.attend
    kernels: Kernels = TORCH_KERNELS

    def __call__(self, x: Tensor, rotation: Rotation | None, attention: StepAttention) -> Tensor:
        """rotation: at the tokens' positions; None: this layer has none. attention: of this step."""
        kv_size = self.num_kv_heads * self.head_dim
        q_size = self.num_heads * self.head_dim
        q, k, v = torch.split(self.qkv(x), [q_size, kv_size, kv_size], dim=-1)
        if self.norms is not None and not self.norms.each_head:
            q, k = self.norms.q(q), self.norms.k(k)
        shape = (x.shape[0], -1, self.head_dim)
        q, k, v = q.view(shape), k.view(shape), v.view(shape)
        return self.o(attention.attend(self.layer, q, k, v, self.sinks, self._preparation(rotation)))

    def _preparation(self, rotation: Rotation | None) -> HeadPreparation | None:
        norms = self.norms if self.norms is not None and self.norms.each_head else None
        if norms is not None:
            return HeadPreparation(self.kernels, rotation, norms.q.weight, norms.k.weight, norms.q.eps)
        return None if rotation is None else HeadPreparation(self.kernels, rotation)
