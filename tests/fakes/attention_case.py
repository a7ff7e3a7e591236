"""Rows of one step with random keys and values in a pool, and what attention must give: written out over whole
sequences in fp64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.attention.interface import AttentionVariant, StepRows
from minisgl_backend.attention.torch_backend import TorchAttention
from minisgl_backend.kvpool.paged import KvShape, PagedKvPool

if TYPE_CHECKING:
    from fakes.attention_backends import Backend  # imports pytest, which the proof on a GPU does without


class AttentionCase:
    """Keys and values of whole sequences, and the same written into a pool up to each row's start."""

    def __init__(
        self,
        rows: Sequence[tuple[int, int]],  # (tokens already in the pool, tokens of this step)
        page_size: int,
        dtype: torch.dtype = torch.float32,
        *,
        heads: int = 6,
        kv_heads: int = 2,
        dim: int = 16,
        variants: Sequence[AttentionVariant] = (),  # of the layers; none: two plain ones
        seed: int = 3,
        backend: Backend = TorchAttention,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.rows, self.page_size, self.backend = tuple(rows), page_size, backend
        self.variants = tuple(variants) or (AttentionVariant(dim**-0.5),) * 2
        layers, ends = len(self.variants), [start + length for start, length in rows]
        self.keys = [normal(layers, end, kv_heads, dim) for end in ends]
        self.values = [normal(layers, end, kv_heads, dim) for end in ends]
        self.queries = normal(sum(length for _, length in rows), heads, dim)
        self.sinks = [normal(heads) if variant.sinks else None for variant in self.variants]
        needs = [-(-end // page_size) for end in ends]
        self.pool = PagedKvPool(KvShape(layers, kv_heads, dim, dtype), sum(needs), page_size, torch.device("cpu"))
        order = torch.randperm(sum(needs), generator=generator).tolist()
        tables = torch.full((len(rows), max(needs)), self.pool.scratch_page)
        for row, need in enumerate(needs):
            tables[row, :need] = torch.tensor([order.pop() for _ in range(need)])
        self.step = StepRows(np.array([s for s, _ in rows]), np.array([n for _, n in rows]), tables)
        self.fill()

    def fill(self) -> None:
        """What the rows' earlier steps have left in the pool."""
        for layer in range(len(self.variants)):
            for store, whole in zip(self.pool.layer(layer), (self.keys, self.values), strict=True):
                for row, (start, _) in enumerate(self.rows):
                    positions = torch.arange(start)
                    places = self.step.page_tables[row, positions // self.page_size], positions % self.page_size
                    store[places] = whole[row][layer, :start]

    def new(self, whole: list[Tensor], layer: int) -> Tensor:
        """Of all rows, what this step computes."""
        return torch.cat([w[layer, start:] for w, (start, _) in zip(whole, self.rows, strict=True)])

    def expected(self, layer: int) -> Tensor:
        """[tokens, heads · dim] fp64, each row by itself. A hidden place does not take part, whatever it holds."""
        variant, sinks = self.variants[layer], self.sinks[layer]
        heads, outs, token = self.queries.shape[1], [], 0
        for keys, values, (start, length) in zip(self.keys, self.values, self.rows, strict=True):
            k, v = (x[layer].double().repeat_interleave(heads // x.shape[2], 1) for x in (keys, values))
            q = self.queries[token : token + length].double()
            token += length
            behind = torch.arange(start, start + length)[:, None] - torch.arange(start + length)[None, :]
            seen = (behind >= 0) & (behind < (variant.window or 1 << 40))
            scores = torch.einsum("lhd,thd->hlt", q, k) * variant.scale
            if variant.softcap:
                scores = variant.softcap * torch.tanh(scores / variant.softcap)
            scores = scores.masked_fill(~seen, -torch.inf)
            if sinks is not None:
                scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, length, 1)), -1)
            weights = scores.softmax(-1)[..., : start + length]
            broken = ~v.isfinite().flatten(1).all(-1)
            out = torch.einsum("hlt,thd->lhd", weights, v.masked_fill(broken[:, None, None], 0.0)).flatten(1)
            outs.append(out.masked_fill((seen & broken).any(-1, keepdim=True), torch.nan))
        return torch.cat(outs)

    def attend(self, layer: int) -> Tensor:
        attention = self.backend(self.pool, self.variants).begin(self.step)
        keys, values = self.new(self.keys, layer), self.new(self.values, layer)
        return attention.attend(layer, self.queries, keys, values, self.sinks[layer])
