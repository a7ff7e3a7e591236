"""The torch backend against attention written out over whole sequences in fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl_backend.attention import torch_backend
from minisgl_backend.attention.interface import AttentionVariant, StepRows
from minisgl_backend.attention.torch_backend import TorchAttention
from minisgl_backend.kvpool.paged import KvShape, PagedKvPool

HEADS, KV_HEADS, DIM, LAYERS = 6, 2, 8, 2

# (tokens already in the pool, tokens of this step) of each row: decode rows far apart in length, fresh chunks,
# chunks with a prefix, a one-token prompt, a prefix that ends inside a page and one that ends at its border
ROWS = [(0, 1), (7, 1), (300, 1), (5, 4), (0, 9), (16, 5), (31, 1), (48, 1), (0, 1), (33, 16)]


class Case:
    """Keys and values of whole sequences, and the same written into a pool up to each row's start."""

    def __init__(self, rows: list[tuple[int, int]], page_size: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(3)
        ends = [start + length for start, length in rows]
        self.rows = rows
        self.keys = [torch.randn(LAYERS, end, KV_HEADS, DIM, generator=generator).to(dtype) for end in ends]
        self.values = [torch.randn(LAYERS, end, KV_HEADS, DIM, generator=generator).to(dtype) for end in ends]
        self.queries = torch.randn(sum(n for _, n in rows), HEADS, DIM, generator=generator).to(dtype)
        needs = [-(-end // page_size) for end in ends]
        self.variants = [AttentionVariant(DIM**-0.5)] * LAYERS
        self.pool = PagedKvPool(KvShape(LAYERS, KV_HEADS, DIM, dtype), sum(needs), page_size, torch.device("cpu"))
        order = torch.randperm(sum(needs), generator=generator).tolist()
        tables = torch.full((len(rows), max(needs)), self.pool.scratch_page)
        for row, need in enumerate(needs):
            tables[row, :need] = torch.tensor([order.pop() for _ in range(need)])
        self.step = StepRows(np.array([s for s, _ in rows]), np.array([n for _, n in rows]), tables)
        for layer in range(LAYERS):
            for store, whole in zip(self.pool.layer(layer), (self.keys, self.values), strict=True):
                for row, (start, _) in enumerate(rows):
                    positions = torch.arange(start)
                    places = tables[row, positions // page_size], positions % page_size
                    store[places] = whole[row][layer, :start]

    def new(self, whole: list[Tensor], layer: int) -> Tensor:
        return torch.cat([w[layer, start:] for w, (start, _) in zip(whole, self.rows, strict=True)])

    def expected(self, layer: int) -> Tensor:
        """Row by row from the whole sequences, in fp64."""
        outs, token = [], 0
        for keys, values, (start, length) in zip(self.keys, self.values, self.rows, strict=True):
            k, v = (x[layer].double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (keys, values))
            q = self.queries[token : token + length].double()
            hidden = torch.arange(start + length)[None, :] > torch.arange(start, start + length)[:, None]
            scores = torch.einsum("lhd,thd->hlt", q, k) * DIM**-0.5
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            outs.append(torch.einsum("hlt,thd->lhd", weights, v).flatten(1))
            token += length
        return torch.cat(outs)

    def attend(self, layer: int) -> Tensor:
        attention = TorchAttention(self.pool, self.variants).begin(self.step)
        return attention.attend(layer, self.queries, self.new(self.keys, layer), self.new(self.values, layer))


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_mixed_rows_attend_to_their_own_positions_only(page_size: int, dtype: torch.dtype, tolerance: float) -> None:
    case = Case(ROWS, page_size, dtype)
    for layer in range(LAYERS):
        torch.testing.assert_close(case.attend(layer).double(), case.expected(layer), atol=tolerance, rtol=0)


def test_a_group_of_decode_rows_is_cut_where_gathering_it_would_take_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_backend._GATHER_BYTES, "cpu", 40 * 2 * KV_HEADS * DIM * 4)
    case = Case([(19, 1)] * 5, 16, torch.float32)
    attention = TorchAttention(case.pool, case.variants).begin(case.step)
    assert [len(group.tokens) for group in attention.groups] == [1] * 5
    torch.testing.assert_close(case.attend(0).double(), case.expected(0), atol=1e-5, rtol=0)


def test_a_row_sees_what_another_row_of_the_same_step_writes_to_a_shared_page() -> None:
    """The rule on which the radix cache will stand: all rows write before any row attends."""
    case = Case([(0, 4), (4, 2)], 4, torch.float32)
    case.step.page_tables[1, 0] = case.step.page_tables[0, 0]  # row 1 takes its prefix from row 0's page
    case.keys[1][:, :4], case.values[1][:, :4] = case.keys[0], case.values[0]
    torch.testing.assert_close(case.attend(0).double(), case.expected(0), atol=1e-5, rtol=0)
