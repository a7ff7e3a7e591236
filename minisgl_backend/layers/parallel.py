"""Layers of which each rank has a part, put together by the group (tensor parallelism, Shoeybi et al. 2019).

A product whose weight's rows are dealt out (query, key and value heads, the inner vectors of an MLP) needs nothing of
the kind: each rank computes its own outputs. One whose columns are dealt out gives each rank a part of every sum, and
they are added up: once after the attention, once after the MLP, and once for the embedding. The head's columns of
logits are gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl_backend.distributed.group import RankGroup
from minisgl_backend.layers.embedding import Embedding
from minisgl_backend.layers.linear import LinearOp
from minisgl_backend.layers.mlp import Mlp


@dataclass(frozen=True, slots=True)
class SummedLinear:
    """See LinearOp. `part` has some of the columns; a bias is rank 0's alone."""

    part: LinearOp
    group: RankGroup

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.add_up(self.part(x))


@dataclass(frozen=True, slots=True)
class SummedMlp:
    """See Mlp. `part` has some of the inner vectors, of each of its experts where there are some."""

    part: Mlp
    group: RankGroup

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.add_up(self.part(x))


@dataclass(frozen=True, slots=True)
class SummedEmbedding:
    """See EmbeddingOp. `part` has rows `first` … `first` + `rows` - 1; a token of others adds zeros."""

    part: Embedding
    first: int
    rows: int
    group: RankGroup

    def __call__(self, tokens: Tensor) -> Tensor:
        return self.group.add_up(self.part.own(tokens, self.first, self.rows))


@dataclass(frozen=True, slots=True)
class JoinedHead:
    """See LinearOp. `part` gives the logits of as many ids as every rank has, the last ones of nobody: they are cut
    off, or a row whose logits are all negative would choose one of them.
    """

    part: LinearOp
    vocab_size: int
    group: RankGroup

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.join_columns(self.part(x), self.vocab_size)


@dataclass(frozen=True, slots=True)
class AllHeadsNorm:
    """The RMS norm over the heads of all ranks (OLMo 2). weight: of this rank's heads; copies: ranks that have the same
    heads, where there are fewer than ranks; size: of all heads together.
    """

    weight: Tensor
    eps: float
    size: int
    copies: int
    group: RankGroup

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        squares = self.group.add_up(wide.square().sum(-1, keepdim=True))
        scaled = wide * torch.rsqrt(squares / (self.size * self.copies) + self.eps)
        if self.weight.dtype == torch.float32:
            return (scaled * self.weight).to(x.dtype)
        return scaled.to(x.dtype) * self.weight
