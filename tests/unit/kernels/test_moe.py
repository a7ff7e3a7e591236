"""The experts: the reference against numbers worked out by hand, the variant for CPUs against the reference."""

from __future__ import annotations

import math

import pytest
import torch

from fakes.experts import random_experts, random_routing, random_tokens
from minisgl_backend.kernels.moe import (
    NO_EXPERT,
    ExpertActivation,
    ExpertsOp,
    ExpertWeights,
    Routing,
    mix_experts,
    mix_experts_reference,
)

SILU = ExpertActivation("silu")
CLAMPED = ExpertActivation("clamped_swiglu", alpha=1.702, limit=0.7)
BOTH = pytest.mark.parametrize("op", [mix_experts_reference, mix_experts])


@BOTH
def test_a_token_gets_the_weighted_sum_of_its_experts(op: ExpertsOp) -> None:
    """Two experts of one number each: down · silu(gate · x) · (up · x), and biases."""
    experts = ExpertWeights(
        gate_up=torch.tensor([[[1.0], [2.0]], [[-1.0], [3.0]]]),
        down=torch.tensor([[[5.0]], [[7.0]]]),
        gate_up_bias=torch.tensor([[0.5, 0.0], [0.0, 1.0]]),
        down_bias=torch.tensor([[10.0], [20.0]]),
    )

    def silu(value: float) -> float:
        return value / (1 + math.exp(-value))

    first, second = 5 * silu(2.5) * 4 + 10, 7 * silu(-2.0) * 7 + 20
    routing = Routing(torch.tensor([[1, 0], [0, NO_EXPERT]]), torch.tensor([[0.25, 0.75], [0.5, 9.0]]))
    mixed = op(torch.tensor([[2.0], [2.0]]), routing, experts, SILU)
    torch.testing.assert_close(mixed, torch.tensor([[0.25 * second + 0.75 * first], [0.5 * first]]))


def test_the_clamped_activation_of_gpt_oss_clamps_gate_from_above_and_up_from_both_sides() -> None:
    gate, up = torch.tensor([[9.0, -9.0, 0.5, 0.5]]), torch.tensor([[0.1, 0.1, -9.0, 9.0]])

    def swish(value: float) -> float:
        return value / (1 + math.exp(-1.702 * value))

    expected = [swish(0.7) * 1.1, swish(-9.0) * 1.1, swish(0.5) * 0.3, swish(0.5) * 1.7]
    torch.testing.assert_close(CLAMPED(gate, up), torch.tensor([expected]))
    assert gate[0, 0] == 9.0 and up[0, 2] == -9.0, "arguments stay"


@pytest.mark.parametrize("activation", [SILU, ExpertActivation("gelu_tanh"), CLAMPED], ids=lambda it: it.kind)
@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(0, 4, 2), (1, 4, 4), (7, 16, 3), (65, 5, 1), (33, 8, 8)])
def test_the_variant_for_cpus_equals_the_reference(
    tokens: int, num_experts: int, top_k: int, activation: ExpertActivation
) -> None:
    x, routing = random_tokens(tokens, 20), random_routing(tokens, num_experts, top_k)
    experts = random_experts(num_experts, 20, 12, biases=activation is CLAMPED)
    expected = mix_experts_reference(x, routing, experts, activation)
    got = mix_experts(x, routing, experts, activation)
    assert got.shape == x.shape and (tokens == 0 or expected.std() > 0.1)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


def test_all_tokens_may_choose_one_expert() -> None:
    x, experts = random_tokens(40, 16), random_experts(6, 16, 8)
    routing = Routing(torch.full((40, 1), 5), torch.ones(40, 1))
    torch.testing.assert_close(mix_experts(x, routing, experts, SILU), experts.run(5, x, SILU))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 4e-2), (torch.float16, 4e-3)])
def test_half_precision_is_summed_in_fp32(dtype: torch.dtype, tolerance: float) -> None:
    """Values reach 4; beside the roundings of each expert's products there is one, of the sum."""
    x, routing, experts = random_tokens(30, 32, dtype), random_routing(30, 8, 8), random_experts(8, 32, 16, dtype=dtype)
    wide = ExpertWeights(experts.gate_up.float(), experts.down.float())
    expected = mix_experts_reference(x.float(), routing, wide, SILU)
    for op in (mix_experts_reference, mix_experts):
        got = op(x, routing, experts, SILU)
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), expected, atol=tolerance, rtol=tolerance)


@BOTH
def test_rows_without_an_expert_reach_none_and_change_nobody(op: ExpertsOp) -> None:
    """What is in such a row, and the weights of the expert that it would have gone to, are not numbers."""
    x, routing, experts = random_tokens(9, 16), random_routing(9, 4, 2), random_experts(5, 16, 8)
    expected = op(x, routing, experts, SILU)
    experts.gate_up[4] = experts.down[4] = math.nan
    padding = torch.full((3, 16), math.nan)
    padded = Routing(
        torch.cat((routing.experts, torch.full((3, 2), NO_EXPERT))), torch.cat((routing.weights, torch.ones(3, 2)))
    )
    got = op(torch.cat((x, padding)), padded, experts, SILU)
    assert torch.equal(got, torch.cat((expected, torch.zeros(3, 16))))


def test_a_few_tokens_copy_no_weights() -> None:
    """No operator allocates as much as one expert's smaller matrix; the largest may be a hidden row for each place."""
    x, routing, experts = random_tokens(3, 64), random_routing(3, 16, 4), random_experts(16, 64, 32)
    with torch.inference_mode(), torch.autograd.profiler.profile(profile_memory=True, use_kineto=False) as profile:
        mix_experts(x, routing, experts, SILU)
    largest_bytes = max(event.cpu_memory_usage for event in profile.function_events)
    assert 0 < largest_bytes <= 3 * 4 * 64 * x.element_size() < experts.down[0].nbytes
