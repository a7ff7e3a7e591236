"""The Triton kernels of the experts against the reference."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from fakes.experts import random_experts, random_routing, random_tokens
from minisgl_backend.kernels.gpu.expert_blocks import Blocks, sort_into_blocks
from minisgl_backend.kernels.gpu.moe import mix_experts_triton, product_tile
from minisgl_backend.kernels.gpu.routing import choose_experts_triton, router_logits_triton
from minisgl_backend.kernels.moe import (
    NO_EXPERT,
    ExpertActivation,
    ExpertWeights,
    Routing,
    choose_experts,
    mix_experts_reference,
    router_logits,
)

SILU = ExpertActivation("silu")
GELU = ExpertActivation("gelu_tanh")
CLAMPED = ExpertActivation("clamped_swiglu", alpha=1.702, limit=0.7)
ACTIVATIONS = [SILU, GELU, CLAMPED]


@pytest.mark.parametrize(
    ("activation", "tokens", "num_experts", "top_k", "hidden", "inner"),
    [
        *((activation, 1, 4, 2, 33, 17) for activation in ACTIVATIONS),
        (CLAMPED, 37, 3, 2, 70, 40),
        (SILU, 3, 5, 5, 64, 65),
        (SILU, 70, 8, 1, 16, 100),
        (GELU, 5, 40, 3, 129, 24),
    ],
)
def test_it_equals_the_reference_where_no_size_fills_a_block(
    activation: ExpertActivation, tokens: int, num_experts: int, top_k: int, hidden: int, inner: int
) -> None:
    experts = random_experts(num_experts, hidden, inner, biases=activation.alpha > 0)
    x, routing = random_tokens(tokens, hidden), random_routing(tokens, num_experts, top_k)
    expected = mix_experts_reference(x, routing, experts, activation)
    assert expected.std() > 0.05
    got = mix_experts_triton(x, routing, experts, activation)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("tokens", "places"), [(40, 32), (90, 64), (140, 128)])
def test_the_tiles_for_many_places_give_the_same(tokens: int, places: int) -> None:
    dtype = torch.float16  # fp32 has no tile of 128
    experts, x = random_experts(2, 40, 24, dtype=dtype), random_tokens(tokens, 40, dtype)
    routing = random_routing(tokens, 2, 1)
    assert product_tile(tokens, 2, 2).places == places
    assert product_tile(tokens, 2, 4).places == {32: 16, 64: 64, 128: 64}[places]
    wide = ExpertWeights(experts.gate_up.float(), experts.down.float())
    expected = mix_experts_reference(x.float(), routing, wide, SILU)
    torch.testing.assert_close(mix_experts_triton(x, routing, experts, SILU).float(), expected, atol=4e-3, rtol=4e-3)


def test_rows_may_lie_apart() -> None:
    experts, wide, routing = random_experts(4, 24, 16), random_tokens(6, 30), random_routing(6, 4, 2)
    expected = mix_experts_reference(wide[:, :24], routing, experts, SILU)
    got = mix_experts_triton(wide[:, :24], routing, experts, SILU)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_half_precision_is_summed_in_fp32() -> None:
    """fp16: the interpreter's product of bf16 is wrong (Triton 3.9)."""
    experts, x = random_experts(6, 48, 32, dtype=torch.float16), random_tokens(20, 48, torch.float16)
    routing = random_routing(20, 6, 4)
    wide = ExpertWeights(experts.gate_up.float(), experts.down.float())
    expected = mix_experts_reference(x.float(), routing, wide, SILU)
    got = mix_experts_triton(x, routing, experts, SILU)
    assert got.dtype == torch.float16
    torch.testing.assert_close(got.float(), expected, atol=4e-3, rtol=4e-3)


@pytest.fixture
def _new_memory_is_nan() -> Iterator[None]:
    """What a kernel did not write shows when it is read."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_new_memory_is_nan")
def test_rows_without_an_expert_reach_none_and_change_nobody() -> None:
    x, routing, experts = random_tokens(9, 24), random_routing(9, 4, 2), random_experts(5, 24, 16)
    expected = mix_experts_triton(x, routing, experts, SILU)
    experts.gate_up[4] = experts.down[4] = math.nan
    padded = Routing(
        torch.cat((torch.full((3, 2), NO_EXPERT), routing.experts)),
        torch.cat((torch.full((3, 2), math.nan), routing.weights)),
    )
    x = torch.cat((torch.full((3, 24), math.nan), x))
    got = mix_experts_triton(x, padded, experts, SILU)
    assert torch.equal(got, torch.cat((torch.zeros(3, 24), expected)))


def test_a_batch_of_padding_alone_and_an_empty_one_are_nothing() -> None:
    x, experts = random_tokens(3, 24), random_experts(5, 24, 16)
    nobody = Routing(torch.full((3, 2), NO_EXPERT), torch.ones(3, 2))
    assert torch.equal(mix_experts_triton(x, nobody, experts, SILU), torch.zeros(3, 24))
    empty = Routing(nobody.experts[:0], nobody.weights[:0])
    assert mix_experts_triton(x[:0], empty, experts, SILU).shape == (0, 24)


def assert_sorted(chosen: torch.Tensor, num_experts: int, size: int) -> Blocks:
    """Each place that has an expert is in a block of that one; each block begins with its places, or is nobody's."""
    blocks = sort_into_blocks(chosen, num_experts, size)
    flat, seen = chosen.flatten().tolist(), []
    owners = blocks.experts.tolist()
    if blocks.places is None:
        assert owners == flat
        return blocks
    for expert, places in zip(owners, blocks.places.view(-1, size).tolist(), strict=True):
        if expert == NO_EXPERT:
            continue
        held = [place for place in places if place != blocks.empty]
        assert held and places[: len(held)] == held and {flat[place] for place in held} == {expert}
        seen += held
    assert sorted(seen) == [place for place, expert in enumerate(flat) if expert != NO_EXPERT]
    return blocks


def test_every_place_is_in_one_block_of_its_expert() -> None:
    direct = 0
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        tokens, num_experts = (int(n) for n in torch.randint(1, 24, (2,), generator=generator))
        chosen = random_routing(tokens, num_experts, min(num_experts, 1 + seed % 4)).experts
        chosen = chosen.masked_fill(torch.rand(tokens, 1, generator=generator) < 0.2, NO_EXPERT)
        direct += assert_sorted(chosen, num_experts, 4).places is None
    assert 2 <= direct <= 8


@pytest.mark.parametrize("tokens", [700, 3000])  # more than a step of a program
def test_many_places_are_counted_before_they_are_sorted(tokens: int) -> None:
    chosen = random_routing(tokens, 9, 3).experts
    chosen[::5] = NO_EXPERT
    chosen[chosen == 4] = NO_EXPERT  # whom nobody chose has no block
    assert_sorted(chosen, 9, 16)


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(1, 1, 1), (3, 5, 5), (9, 60, 4), (5, 128, 8)])
def test_a_router_chooses_as_the_reference_does(tokens: int, num_experts: int, top_k: int, renormalise: bool) -> None:
    logits = random_tokens(tokens, num_experts) * 3
    logits[:, ::2] = logits[:, ::2].round()  # many are equal, and zeros of both signs among them
    assert_chosen_alike(logits, top_k, renormalise)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, below the interpreter
@pytest.mark.parametrize("renormalise", [False, True])
def test_a_router_chooses_as_the_reference_does_where_logits_are_not_finite(renormalise: bool) -> None:
    inf, nan = math.inf, math.nan
    rows = [
        [nan] * 5,
        [1.0, nan, 2.0, -nan, 0.0],
        [-inf, -inf, 1.0, -inf, -inf],
        [-inf] * 5,
        [inf, 1.0, inf, -inf, 2.0],
        [0.0, -0.0, 1e-45, -1e-45, 0.0],
        [3.4e38, -3.4e38, 1e38, 0.0, -1.0],
    ]
    assert_chosen_alike(torch.tensor(rows), 3, renormalise)


@pytest.mark.parametrize(("tokens", "hidden"), [(1, 5), (16, 70), (3, 1500), (17, 20), (0, 8)])  # 17: the product
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_routers_logits_are_summed_in_fp64(tokens: int, hidden: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    weight, bias = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((6, hidden), (6,)))
    x = random_tokens(tokens, hidden + 1, dtype)[:, :hidden]
    for added in (None, bias):
        got, expected = router_logits_triton(x, weight, added), router_logits(x, weight, added)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=1.2e-7)  # the other side of one rounding


def assert_chosen_alike(logits: torch.Tensor, top_k: int, renormalise: bool) -> None:
    expected = choose_experts(logits, top_k, renormalise=renormalise)
    got = choose_experts_triton(logits, top_k, renormalise=renormalise)
    assert torch.equal(got.experts, expected.experts) and got.experts.dtype == torch.int64
    torch.testing.assert_close(got.weights, expected.weights, atol=1e-7, rtol=1e-6, equal_nan=True)
