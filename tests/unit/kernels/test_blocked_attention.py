"""Attention block by block against transformers' own formulas, and where its numbers are not finite."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss

from minisgl_backend.kernels.blocked_attention import BlockedAttention
from minisgl_backend.kernels.finite import broken_vectors

ROWS, TOKENS, HEADS, KV_HEADS, DIM = 3, 20, 6, 2, 8


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


Q, K, V = (normal(ROWS, TOKENS, heads, DIM, seed=heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
SINKS = normal(HEADS, seed=9)
HIDDEN = torch.ones(1, TOKENS, TOKENS, dtype=torch.bool).triu_(1)


def blocked(borders: list[int], *, softcap: float = 0.0, sinks: Tensor | None = None) -> Tensor:
    """Causal, with keys in blocks between `borders`, the last first; queries before a block do not see it."""
    attention = BlockedAttention(Q, KV_HEADS, scale=0.4, softcap=softcap, sinks=sinks)
    for begin, end in reversed(list(itertools.pairwise([0, *borders, TOKENS]))):
        k, v = K[:, begin:end].clone(), V[:, begin:end].clone()
        attention.add(slice(begin, TOKENS), k, v, HIDDEN[:, begin:, begin:end])
    return attention.result()


def module() -> SimpleNamespace:
    return SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, sinks=SINKS, training=False, head_dim=DIM)


BORDERS = [[], [1], [19], [5, 6, 13], list(range(1, TOKENS))]


@pytest.mark.parametrize("borders", BORDERS)
def test_a_soft_cap_is_that_of_gemma_2(borders: list[int]) -> None:
    mask = torch.zeros(HIDDEN.shape).masked_fill_(HIDDEN, -torch.inf)[:, None]
    q, k, v = (x.transpose(1, 2) for x in (Q, K, V))
    for cap in (0.7, 50.0):
        expected, _ = gemma2(module(), q, k, v, mask, scaling=0.4, softcap=cap)
        torch.testing.assert_close(blocked(borders, softcap=cap), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("borders", BORDERS)
def test_sinks_are_those_of_gpt_oss(borders: list[int]) -> None:
    mask = torch.zeros(HIDDEN.shape).masked_fill_(HIDDEN, -torch.inf)[:, None]
    q, k, v = (x.transpose(1, 2) for x in (Q, K, V))
    expected, _ = gpt_oss(module(), q, k, v, mask, scaling=0.4)
    torch.testing.assert_close(blocked(borders, sinks=SINKS), expected, atol=2e-6, rtol=0)


def test_a_query_may_meet_blocks_of_which_it_sees_nothing_before_the_first_that_it_sees() -> None:
    attention = BlockedAttention(Q, KV_HEADS, scale=0.4)
    nothing = torch.ones(1, TOKENS, 7, dtype=torch.bool)
    attention.add(slice(0, TOKENS), K[:, :7].clone(), V[:, :7].clone(), nothing)
    attention.add(slice(0, TOKENS), K.clone(), V.clone(), HIDDEN)
    attention.add(slice(0, TOKENS), K[:, :7].clone(), V[:, :7].clone(), nothing)
    torch.testing.assert_close(attention.result(), blocked([]), atol=1e-6, rtol=0)


def test_sums_are_taken_in_fp32_whatever_the_dtype() -> None:
    """Scores of 300, values of 1 to 2: in fp16 the sum of 4000 weights, or of what they weigh, would end at 2048."""
    q = torch.full((1, 1, 1, DIM), 300.0, dtype=torch.float16)
    k = torch.ones(1, 4000, 1, DIM, dtype=torch.float16)
    v = torch.linspace(1, 2, 4000)[None, :, None, None].expand(1, -1, 1, DIM).half()
    attention = BlockedAttention(q, 1, scale=1 / DIM)
    attention.add(slice(0, 1), k.clone(), v.clone(), None)
    result = attention.result()
    assert result.dtype == torch.float16
    torch.testing.assert_close(result.float(), torch.full((1, 1, 1, DIM), 1.5), atol=1e-3, rtol=0)


def test_broken_vectors_are_those_with_a_nan_or_an_infinity_and_no_large_ones() -> None:
    large = torch.finfo(torch.float32).max
    rows = [[1, 2], [torch.nan, 1], [1, torch.inf], [-torch.inf, 0], [large, large], [-large, large]]
    assert broken_vectors(torch.tensor(rows)).flatten().tolist() == [False, True, True, True, False, False]
