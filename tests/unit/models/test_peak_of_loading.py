"""What a load needs of main memory at its peak: the weights, and one shard.

Measured in a process of its own, which has done nothing else: in the tests' process other tests' threads and holes in
the heap count too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minisgl_backend.models.checkpoint import RandomTensors
from minisgl_backend.models.tensors import expected_tensors
from tests.unit.models.load_and_tell import SPEC

MIB = 1 << 20
SLACK_BYTES = 16 * MIB  # what the allocator keeps, and the kernel's counters, which are exact to some pages a thread
QUANTISING_BYTES = 24 * MIB  # a block of 4 MiB in fp32 in a few forms, and the joined parts of a tensor


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bf16, a file for each layer."""
    folder = tmp_path_factory.mktemp("shards")
    source = RandomTensors(expected_tensors(SPEC), seed=0, dtype=torch.bfloat16)
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name in source.shapes():
        layer = name.split(".")[2] if ".layers." in name else "0"
        files.setdefault(f"model-{layer}.safetensors", {})[name] = torch.zeros(source.shapes()[name]).bfloat16()
    for file, tensors in files.items():
        save_file(tensors, folder / file, {"format": "pt"})
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def shard_bytes(folder: Path) -> int:
    return max(file.stat().st_size for file in folder.glob("*.safetensors"))


@dataclass(frozen=True)
class Load:
    taken: int  # bytes at the peak
    weights: int  # bytes


def load(shards: Path, dtype: str, method: str = "none") -> Load:
    """Skips where the kernel does not tell the peak."""
    command = [sys.executable, "-m", "tests.unit.models.load_and_tell", str(shards), dtype, method]
    told = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert told.returncode == 0, told.stderr
    answer = json.loads(told.stdout)
    if answer["taken"] is None:
        pytest.skip("this kernel does not tell")
    return Load(answer["taken"], answer["weights"])


def test_a_converting_load_takes_the_weights_and_one_shard(shards: Path) -> None:
    seen = load(shards, "float32")
    assert seen.weights > 100 * MIB and seen.taken > seen.weights // 2, "something was loaded"
    assert seen.taken <= seen.weights + shard_bytes(shards) + SLACK_BYTES


@pytest.mark.parametrize(("method", "bits"), [("int8", 8.2), ("int4", 5.1)])
def test_a_quantising_load_takes_its_weights_and_one_shard(method: str, bits: float, shards: Path) -> None:
    """A tensor is quantised some rows at a time."""
    seen = load(shards, "bfloat16", method)
    linear = sum(rows[0] * rows[1] for name, rows in expected_tensors(SPEC).items() if "proj" in name)
    assert seen.weights <= linear * bits / 8 + 3 * MIB, "the linear layers are in so many bits, and the rest is small"
    assert seen.taken <= seen.weights + shard_bytes(shards) + QUANTISING_BYTES + SLACK_BYTES


def test_a_load_that_converts_nothing_stays_in_the_file(shards: Path) -> None:
    """But for q, k, v and gate, up, which are one product each."""
    seen = load(shards, "bfloat16")
    assert seen.taken <= seen.weights + shard_bytes(shards) + SLACK_BYTES
