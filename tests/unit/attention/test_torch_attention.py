"""What the torch backend alone has: pieces and groups that bound what it takes."""

from __future__ import annotations

import pytest
import torch

from fakes.attention_case import AttentionCase
from minisgl_backend.attention import step_views, torch_backend
from minisgl_backend.attention.interface import AttentionVariant
from minisgl_backend.attention.torch_backend import TorchAttention
from minisgl_backend.kernels import blocked_attention

ROWS = [(0, 1), (7, 1), (300, 1), (5, 4), (0, 9), (16, 5), (31, 1), (48, 1), (0, 1), (33, 16)]
VARIANTS = [
    AttentionVariant(0.3),
    AttentionVariant(0.3, window=10),
    AttentionVariant(0.3, softcap=1.5),
    AttentionVariant(0.3, window=10, softcap=1.5, sinks=True),
]


def check(case: AttentionCase) -> None:
    for layer in range(len(case.variants)):
        torch.testing.assert_close(case.attend(layer).double(), case.expected(layer), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dim", [8, 24, 100])
def test_heads_of_sizes_that_no_vector_has(dim: int) -> None:
    check(AttentionCase(ROWS, 16, heads=4, kv_heads=2, dim=dim, variants=VARIANTS))


def test_keys_in_small_blocks_and_queries_in_small_pieces_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(step_views._BLOCK_PLACES, "cpu", 8)
    monkeypatch.setitem(blocked_attention._SCORE_BYTES, "cpu", 4 * 6 * 8 * 3)
    monkeypatch.setattr(step_views, "_LEAST_QUERIES", 2)
    monkeypatch.setitem(torch_backend._GATHER_BYTES, "cpu", 1 << 14)
    check(AttentionCase(ROWS, 4, variants=VARIANTS))


def test_a_group_of_decode_rows_is_cut_where_gathering_it_would_take_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_backend._GATHER_BYTES, "cpu", 40 * 2 * 2 * 16 * 4)
    case = AttentionCase([(19, 1)] * 5, 16)
    (view,) = TorchAttention(case.pool, case.variants).begin(case.step).views.values()
    assert [len(group.tokens) for group in view.groups] == [1] * 5
    check(case)
