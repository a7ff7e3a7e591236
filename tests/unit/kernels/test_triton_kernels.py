"""The Triton kernels where there is no GPU: in Triton's interpreter, and through its compiler; and on a GPU.

The first two have processes of their own: the interpreter must be chosen before anything imports Triton, and torch may
have done so.
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
    experts_op,
    mix_experts_reference,
)

HERE = Path(__file__).parent

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from minisgl_backend.kernels import moe_triton

bf16 = dict.fromkeys(("x", "weight", "bias", "out"), "*bf16")
blocks = dict(places="*i32", experts="*i32", empty="i32", hidden="i32", inner="i32")
product = dict(BIASES=True, PRECISION="tf32", PLACES=64, COLUMNS=64, DEPTH=32)
of_gate_up = {**bf16, **blocks, "x_stride": "i32", "alpha": "fp32", "limit": "fp32"}
of_reduce = dict(outs="*bf16", experts="*i64", weights="*fp32", mixed="*bf16", hidden="i32")
launches = [(moe_triton._gate_up, of_gate_up, dict(TOP_K=4, KIND=kind, **product)) for kind in range(3)]
launches.append((moe_triton._down, {**bf16, **blocks}, product))
launches.append((moe_triton._reduce, of_reduce, dict(TOP_K=4, COLUMNS=1024)))
for capability in (80, 90):
    for kernel, arguments, constants in launches:
        signature = {**arguments, **dict.fromkeys(constants, "constexpr")}
        made = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", capability, 32))
        assert len(made.asm["cubin"]) > 1000, (capability, kernel)
"""


def run(*arguments: str, **environment: str) -> None:
    """Runs Python. Fails with all that it said when it does."""
    done = subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_tests_of_the_kernels_pass_in_the_interpreter() -> None:
    run("-m", "pytest", "-q", str(HERE / "interpreted"), "-p", "no:cacheprovider", TRITON_INTERPRET="1")


@pytest.mark.slow
def test_the_kernels_compile_to_the_machine_code_of_gpus_that_are_not_here(tmp_path: Path) -> None:
    """A100 and H100. The interpreter is Python: it takes what a compiler does not."""
    run("-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path))


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
    cuda = torch.device("cuda")
    got = experts_op(cuda)(
        x.to(cuda),
        Routing(routing.experts.to(cuda), routing.weights.to(cuda)),
        ExpertWeights(experts.gate_up.to(cuda), experts.down.to(cuda)),
        ExpertActivation("silu"),
    )
    torch.testing.assert_close(got.cpu().float(), expected, atol=tolerance, rtol=tolerance)
