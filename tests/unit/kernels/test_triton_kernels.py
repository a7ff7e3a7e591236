"""The Triton kernels in Triton's interpreter, and those of experts on a GPU. test_triton_models.py has the other half.

They are two files because a file's tests run one after another (`make test`).
"""

from __future__ import annotations

import pytest
import torch

from fakes.experts import random_experts, random_routing, random_tokens
from fakes.interpreted import INTERPRETED, run_interpreted
from minisgl_backend.kernels.moe import (
    NO_EXPERT,
    ExpertActivation,
    ExpertWeights,
    Routing,
    mix_experts_reference,
)


@pytest.mark.slow
def test_the_tests_of_layers_and_draws_pass_in_the_interpreter() -> None:
    names = ("pointwise", "moe", "int8", "sampling", "penalties", "bench_cases")
    run_interpreted(*(str(INTERPRETED / f"test_{name}.py") for name in names))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2), (torch.float16, 4e-3)])
@pytest.mark.parametrize("tokens", [1, 8, 100, 3000])
def test_experts_on_a_gpu_equal_the_reference_in_fp32(tokens: int, dtype: torch.dtype, tolerance: float) -> None:
    """Values reach 4. Sizes that fill no tile, and one row in three without an expert."""
    experts, x = random_experts(20, 200, 120, dtype=dtype), random_tokens(tokens, 200, dtype)
    routing = random_routing(tokens, 20, 4)
    routing.experts[::3] = NO_EXPERT
    wide = ExpertWeights(experts.gate_up.float(), experts.down.float())
    expected = mix_experts_reference(x.float(), routing, wide, ExpertActivation("silu"))
    from minisgl_backend.kernels.gpu.moe import mix_experts_triton

    cuda = torch.device("cuda")
    got = mix_experts_triton(
        x.to(cuda),
        Routing(routing.experts.to(cuda), routing.weights.to(cuda)),
        ExpertWeights(experts.gate_up.to(cuda), experts.down.to(cuda)),
        ExpertActivation("silu"),
    )
    torch.testing.assert_close(got.cpu().float(), expected, atol=tolerance, rtol=tolerance)
