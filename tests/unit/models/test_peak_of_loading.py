"""What a load needs of main memory at its peak: the weights, and one shard."""

from __future__ import annotations

import ctypes
import gc
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minisgl_backend.device.host_peak import HostPeak
from minisgl_backend.models.checkpoint import Checkpoint, RandomTensors
from minisgl_backend.models.folder import parse_model_spec
from minisgl_backend.models.load import build_decoder
from minisgl_backend.models.size import weight_bytes
from minisgl_backend.models.tensors import expected_tensors

MIB = 1 << 20
LAYERS = 5
SLACK_BYTES = 16 * MIB  # what the allocator keeps, and the kernel's counters, which are exact to some pages a thread

SPEC = parse_model_spec(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 1024,
        "hidden_size": 1024,
        "intermediate_size": 2560,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    {},
)
QUANTISING_BYTES = 24 * MIB  # a block of 4 MiB in fp32 in a few forms, and the joined parts of a tensor
_M_MMAP_THRESHOLD = -3  # malloc.h: what is larger gets pages of its own


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small pieces of work: beside other processes several threads wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def plain_heap() -> Iterator[None]:
    """What was freed goes back to the system, now and while the test runs, so that neither a load is served out of what
    tests before have left, and seems to take less, nor holes in the heap count as taken. glibc has this; others skip.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        pytest.skip("this allocator can not be told")
    gc.collect()
    libc.malloc_trim(0)
    libc.mallopt(_M_MMAP_THRESHOLD, MIB)
    yield
    libc.mallopt(_M_MMAP_THRESHOLD, 32 * MIB)  # to where it moves by itself


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


def test_a_converting_load_takes_the_weights_and_one_shard(shards: Path) -> None:
    peak = HostPeak()
    model = build_decoder(SPEC, Checkpoint(shards), torch.device("cpu"), torch.float32, 32)
    taken = peak.bytes()
    if taken is None:
        pytest.skip("this kernel does not tell")
    weights = weight_bytes(model)
    assert weights > 100 * MIB and taken > weights // 2, "something was loaded"
    assert taken <= weights + shard_bytes(shards) + SLACK_BYTES


@pytest.mark.parametrize(("method", "bits"), [("int8", 8.2), ("int4", 5.1)])
def test_a_quantising_load_takes_its_weights_and_one_shard(method: str, bits: float, shards: Path) -> None:
    """A tensor is quantised some rows at a time."""
    peak = HostPeak()
    model = build_decoder(SPEC, Checkpoint(shards), torch.device("cpu"), torch.bfloat16, 32, method)  # type: ignore[arg-type]
    taken = peak.bytes()
    if taken is None:
        pytest.skip("this kernel does not tell")
    weights = weight_bytes(model)
    linear = sum(rows[0] * rows[1] for name, rows in expected_tensors(SPEC).items() if "proj" in name)
    assert weights <= linear * bits / 8 + 3 * MIB, "the linear layers are in so many bits, and the rest is small"
    assert taken <= weights + shard_bytes(shards) + QUANTISING_BYTES + SLACK_BYTES


def test_a_load_that_converts_nothing_stays_in_the_file(shards: Path) -> None:
    """But for q, k, v and gate, up, which are one product each."""
    peak = HostPeak()
    model = build_decoder(SPEC, Checkpoint(shards), torch.device("cpu"), torch.bfloat16, 32)
    taken = peak.bytes()
    if taken is None:
        pytest.skip("this kernel does not tell")
    assert taken <= weight_bytes(model) + shard_bytes(shards) + SLACK_BYTES
