"""Our GPU kernels through the compiler, for GPUs that are not here: what whole models launch, each kernel once.

`make gpu-compile` compiles every launch of every shape; tests/gpu/compilation.py says what is asked of each.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpu.verdict import CAPABILITIES, SHARED_BYTES, SPILL_BYTES, Compiled, fault_of

ROOT = Path(__file__).resolve().parents[3]
KERNELS = ROOT / "minisgl_backend" / "kernels" / "gpu"

WELL = Compiled("_kernel", 90, "", 64, 0, 0, 1024, 4, ("mma.sync",), ((16, 64, 64, "bf16"),), "")


@pytest.mark.slow
def test_each_kernel_compiles_to_sound_machine_code_of_gpus_that_are_not_here() -> None:
    """The interpreter is Python: it takes what a compiler does not."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.gpu.compilation"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found["kernels"]) == launched_kernels(), "a kernel that no model launches, or one that nobody knows"
    assert found["compiled"] == len(found["kernels"]) * len(CAPABILITIES)
    assert {"_attend_tile", "_attend_splits", "_gate_up", "_down"} <= set(found["products"])


def launched_kernels() -> set[str]:
    """Names that our code launches, `kernel[grid](…)`."""
    names = set()
    for file in KERNELS.glob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        jitted = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                kernel = node.func.value
                if isinstance(kernel, ast.Name) and kernel.id in jitted:
                    names.add(kernel.id)
    return names


def test_a_kernel_that_is_well_is_found_well() -> None:
    assert fault_of(WELL) == ""
    tensor_cores = ("mma.sync", "wgmma.mma_async")
    assert fault_of(replace(WELL, dots=((128, 64, 64, "bf16"),), instructions=tensor_cores)) == ""
    assert fault_of(replace(WELL, dots=((128, 64, 64, "f32"),), instructions=())) == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"registers": 0}, "no registers"),
        ({"spill_bytes": SPILL_BYTES + 4}, "spills"),
        ({"shared_bytes": SHARED_BYTES[90] + 1}, "shared memory"),
        ({"instructions": ()}, "without matrix instructions"),
        ({"dots": ((64, 64, 64, "f16"),)}, "without wgmma"),
        ({"dots": ((16, 64, 64, "f32"), (64, 8, 16, "bf16"))}, "without wgmma"),
    ],
    ids=lambda it: it if isinstance(it, str) else None,
)
def test_a_kernel_that_is_not_well_is_told(changes: dict[str, object], words: str) -> None:
    assert words in fault_of(replace(WELL, **changes))  # type: ignore[arg-type]
