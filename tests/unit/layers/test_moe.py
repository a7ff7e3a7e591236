"""The router's choice, and what a sparse MLP makes of it."""

from __future__ import annotations

import math

import pytest
import torch

from fakes.experts import random_experts, random_tokens
from minisgl_backend.kernels.activation import silu_mul
from minisgl_backend.kernels.moe import NO_EXPERT, ExpertActivation, mix_experts, mix_experts_reference
from minisgl_backend.layers.linear import Linear
from minisgl_backend.layers.mlp import GatedMlp
from minisgl_backend.layers.moe import Router, SharedExpert, SparseMlp

SILU = ExpertActivation("silu")


def router_of(logits: list[float], *, top_k: int, renormalise: bool) -> Router:
    """Gives every token these logits: its input is one number that must be 1."""
    return Router(torch.tensor(logits, dtype=torch.float64)[:, None], None, top_k, renormalise)


def test_weights_are_those_of_a_softmax_over_all_experts_or_over_the_chosen() -> None:
    logits = [1.0, 3.0, 0.0, 2.0]
    powers = [math.exp(logit) for logit in logits]
    one = torch.ones(1, 1)
    over_all = router_of(logits, top_k=2, renormalise=False)(one)
    over_chosen = router_of(logits, top_k=2, renormalise=True)(one)
    assert over_all.experts.tolist() == over_chosen.experts.tolist() == [[1, 3]]
    torch.testing.assert_close(over_all.weights, torch.tensor([[powers[1] / sum(powers), powers[3] / sum(powers)]]))
    chosen = powers[1] + powers[3]
    torch.testing.assert_close(over_chosen.weights, torch.tensor([[powers[1] / chosen, powers[3] / chosen]]))


def test_of_equal_logits_the_lower_number_wins() -> None:
    """64 experts: beyond the sizes for which an unstable order happens to look stable."""
    logits = [0.0, 5.0] * 32
    routing = router_of(logits, top_k=34, renormalise=True)(torch.ones(3, 1))
    assert routing.experts.tolist() == [[*range(1, 64, 2), 0, 2]] * 3


def test_experts_whose_probability_rounds_to_zero_are_still_told_apart() -> None:
    routing = router_of([-900.0, 0.0, -300.0, -200.0], top_k=3, renormalise=False)(torch.ones(1, 1))
    assert routing.experts.tolist() == [[1, 3, 2]] and routing.weights.tolist() == [[1.0, 0.0, 0.0]]


def test_a_bias_takes_part_in_the_choice() -> None:
    router = Router(torch.zeros(3, 4, dtype=torch.float64), torch.tensor([0.0, 2.0, 1.0]).double(), 2, True)
    assert router(random_tokens(2, 4)).experts.tolist() == [[1, 2]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_goes_to_the_same_experts_alone_and_in_any_batch(dtype: torch.dtype) -> None:
    """Experts closer to one another than what the order of summing does to a product in fp32."""
    hidden, tokens = 700, 97
    close = torch.randn(hidden, generator=torch.Generator().manual_seed(3)).double()
    nudges = torch.randn(24, hidden, generator=torch.Generator().manual_seed(4)).double()
    router = Router(close + 3e-8 * nudges, None, 4, True)
    x = random_tokens(tokens, hidden, dtype)
    whole = router(x)
    assert len(whole.experts.unique(dim=0)) > tokens // 2, "choices that are all alike would prove nothing"
    for size in (1, 2, 3, 5, 8, 16, 40):
        for begin in range(0, tokens, size):
            part = router(x[begin : begin + size])
            assert torch.equal(part.experts, whole.experts[begin : begin + size])
            assert torch.equal(part.weights, whole.weights[begin : begin + size])


def test_a_row_that_is_not_finite_goes_somewhere_and_shows() -> None:
    x = random_tokens(3, 16)
    x[1] = math.nan
    router = Router(torch.randn(6, 16, generator=torch.Generator().manual_seed(5)).double(), None, 2, True)
    mlp = SparseMlp(router, random_experts(6, 16, 8), SILU, mix_experts)
    out = mlp(x)
    assert bool(out[1].isnan().all()) and bool(out[[0, 2]].isfinite().all())
    torch.testing.assert_close(out[2:], mlp(x[2:]))


def test_padding_rows_reach_no_expert() -> None:
    x = random_tokens(5, 16)
    padding = torch.tensor([False, False, True, False, True])
    router = Router(torch.randn(6, 16, generator=torch.Generator().manual_seed(5)).double(), None, 2, True)
    mlp = SparseMlp(router, random_experts(6, 16, 8), SILU, mix_experts)
    expected = mlp(x)
    x[padding] = math.nan
    assert bool((router(x, padding).experts[padding] == NO_EXPERT).all())
    out = mlp(x, padding)
    torch.testing.assert_close(out[~padding], expected[~padding])
    assert not out[padding].any()


@pytest.mark.parametrize("gated", [True, False])
def test_the_shared_expert_is_added_as_far_as_its_switch_lets_it(gated: bool) -> None:
    hidden, x = 16, random_tokens(4, 16)
    router = Router(torch.randn(6, hidden, generator=torch.Generator().manual_seed(5)).double(), None, 2, False)
    own = random_experts(1, hidden, 10)
    shared = GatedMlp(Linear(own.gate_up[0]), Linear(own.down[0]), silu_mul)
    switch = torch.linspace(-1, 1, hidden)[None]
    experts = random_experts(6, hidden, 8)
    mlp = SparseMlp(router, experts, SILU, mix_experts, SharedExpert(shared, Linear(switch) if gated else None))
    share = torch.sigmoid(x @ switch.T) if gated else 1.0
    expected = mix_experts_reference(x, router(x), experts, SILU) + share * own.run(0, x, SILU)
    torch.testing.assert_close(mlp(x), expected, atol=1e-6, rtol=1e-5)
