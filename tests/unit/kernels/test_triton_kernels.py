"""The Triton kernels in Triton's interpreter, and those of experts on a GPU.

The interpreter has a process of its own: it must be chosen before anything imports Triton, and torch may have done so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fakes.experts import random_experts, random_routing, random_tokens
from minisgl_backend.kernels.moe import (
    NO_EXPERT,
    ExpertActivation,
    ExpertWeights,
    Routing,
    mix_experts_reference,
)

HERE = Path(__file__).parent


def run(*arguments: str, **environment: str) -> None:
    """Runs Python. Fails with all that it said when it does."""
    done = subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


ATTENTION = {
    "test_broken_values.py": ["test_a_row_with_fewer_pages_than_its_group_is_not_filled_up_with_its_own_broken_one"],
    "test_backends.py": [
        "test_a_row_sees_what_another_row_of_the_same_step_writes_to_a_shared_page",
        "test_sinks_that_are_not_declared_or_not_given_are_our_fault",
    ],
    "test_windows.py": ["test_pages_that_the_window_has_left_are_not_read"],
}
"""Of what every attention backend must do, as much as the interpreter does in seconds."""


@pytest.mark.slow
def test_the_tests_of_the_kernels_pass_in_the_interpreter() -> None:
    shared = [f"{HERE.parent / 'attention' / name}::{test}" for name, tests in ATTENTION.items() for test in tests]
    run("-m", "pytest", "-q", str(HERE / "interpreted"), *shared, "-p", "no:cacheprovider", TRITON_INTERPRET="1")


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
