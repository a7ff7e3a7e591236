"""Products over packed weights in a model: what becomes one, where packed weights lie, and who packs them."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from fakes.attention_backends import native_library
from fakes.gguf_model import matrices_as, write_gguf
from fakes.random_model import write_random_llama
from minisgl_backend.config import Quantization
from minisgl_backend.kernels.native.kernels import NativeKernels
from minisgl_backend.layers.linear import Linear, NativeLinear
from minisgl_backend.layers.quant.stored import StoredLinear
from minisgl_backend.models import packed_file
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.models.folder import read_model_spec
from minisgl_backend.models.load import LoadKernels, Packing, load_model
from minisgl_backend.models.packed_file import PackedStore, open_packed, packed_path

SHAPE, DTYPE = (3, 5, 16), torch.float32
VALUES = torch.arange(3 * 5 * 16, dtype=DTYPE).view(SHAPE)


def fill(into: Tensor) -> None:
    into.copy_(VALUES)


def must_not_fill(into: Tensor) -> None:
    raise AssertionError("packed again")


def take(store: PackedStore, name: str = "one", filled: Any = fill) -> Tensor:
    tensor = store.take(name, SHAPE, DTYPE, filled)
    assert torch.equal(tensor, VALUES) and tensor.data_ptr() % 64 == 0
    return tensor


def inode_at(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split()
        begin, end = (int(part, 16) for part in fields[0].split("-"))
        if begin <= address < end:
            return fields[4]
    return "none"


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if file.suffix != ".lock")


def test_who_comes_second_packs_nothing_and_shares_the_pages(tmp_path: Path) -> None:
    path = tmp_path / "packed" / "a.bin"
    with open_packed(path) as store:
        first = [take(store, name) for name in ("one", "two")]
    with open_packed(path) as store:
        second = [take(store, name, must_not_fill) for name in ("one", "two")]
    inodes = {inode_at(tensor.data_ptr()) for tensor in (*first, *second)}
    assert inodes == {str(path.stat().st_ino)} and names(path.parent) == ["a.bin"]


@pytest.mark.parametrize("kept_bytes", [0, 5, 20, 970, -1])
def test_a_file_that_is_not_whole_is_packed_again(tmp_path: Path, kept_bytes: int) -> None:
    path = tmp_path / "a.bin"
    with open_packed(path) as store:
        take(store)
    path.write_bytes(path.read_bytes()[:kept_bytes])
    said: list[str] = []
    with open_packed(path, said.append) as store:
        take(store)
    assert said[0] == "packing weights, once"
    with open_packed(path) as store:
        take(store, filled=must_not_fill)


def test_a_load_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), open_packed(tmp_path / "a.bin") as store:
        take(store)
        raise ZeroDivisionError
    assert names(tmp_path) == []


@pytest.mark.parametrize("whole", [True, False])
def test_a_full_disk_leaves_packed_weights_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """Also one that is nearly full: others need room too."""

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    said: list[str] = []
    with open_packed(tmp_path / "a.bin", said.append) as store:
        kept = take(store)
        if whole:
            monkeypatch.setattr(os, "posix_fallocate", full)
        else:
            monkeypatch.setattr(packed_file, "_LEFT_FREE_BYTES", 1 << 60)
        assert inode_at(take(store, "two").data_ptr()) == "0" and inode_at(take(store, "three").data_ptr()) == "0"
    assert torch.equal(kept, VALUES), "what was mapped before stays"
    assert said[0] == "packing weights, once" and said[1].startswith("packed weights are not kept: [Errno 28] ")
    assert len(said) == 2 and names(tmp_path) == []


def test_a_folder_that_can_not_be_made_leaves_packed_weights_in_memory(tmp_path: Path) -> None:
    (tmp_path / "packed").write_text("a file is in the way")
    said: list[str] = []
    with open_packed(tmp_path / "packed" / "a.bin", said.append) as store:
        take(store)
    assert len(said) == 1 and said[0].startswith("packed weights are not kept: ")


def test_of_two_who_pack_the_same_one_waits_and_takes_what_the_other_packed(tmp_path: Path) -> None:
    path, said = tmp_path / "a.bin", list[str]()
    taken = threading.Event()

    def second() -> None:
        with open_packed(path, said.append) as store:
            take(store, filled=must_not_fill)
            taken.set()

    waiting = threading.Thread(target=second, daemon=True)
    with open_packed(path) as store:
        waiting.start()
        take(store)
        assert not taken.is_set()
    waiting.join(60)
    assert taken.is_set() and said in ([], ["waiting for another process, which packs these weights"])


def load(
    folder: Path, cache: Path, *, quantization: Quantization = "none", dtype: str = "float32"
) -> tuple[Decoder, list[str]]:
    """With native products, and what was said."""
    said: list[str] = []
    library = native_library()
    kernels = LoadKernels(NativeKernels(library), Packing(library.ops.linear, cache, said.append))
    with torch.inference_mode():
        spec = read_model_spec(folder)
        return load_model(spec, folder, torch.device("cpu"), getattr(torch, dtype), 64, quantization, kernels), said


def products(model: Decoder) -> set[str]:
    layer = model.layers[1]
    attention, mlp = layer.attention, layer.mlp
    return {type(op).__name__ for op in (attention.qkv, attention.o, mlp.gate_up, mlp.down)}  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_models_products_are_native_and_give_what_torchs_give(
    tmp_path: Path, dtype: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl_backend.models.load._LEAST_KEPT_BYTES", 0)
    folder = write_random_llama(tmp_path / "model", dtype=dtype, tie_word_embeddings=tied, attention_bias=True)
    native, said = load(folder, tmp_path, dtype=dtype)
    assert [line.split(" in ")[0] for line in said] == ["packing weights, once", "packed weights"]
    again, said = load(folder, tmp_path, dtype=dtype)
    assert said == [], "a second load packs nothing"
    spec = read_model_spec(folder)
    reference = load_model(spec, folder, torch.device("cpu"), getattr(torch, dtype), 64)
    x = torch.randn(5, spec.hidden_size, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    most = 1e-5 if dtype == "float32" else 2e-2
    with torch.inference_mode():
        for model in (native, again):
            assert products(model) == {"NativeLinear"} and isinstance(model.lm_head, NativeLinear)
            for ours, theirs in zip(model.layers, reference.layers, strict=True):
                torch.testing.assert_close(ours.attention.qkv(x), theirs.attention.qkv(x), rtol=most, atol=most)
                torch.testing.assert_close(ours.mlp(x), theirs.mlp(x), rtol=most, atol=most)
            torch.testing.assert_close(model.lm_head(x), reference.lm_head(x), rtol=most, atol=most)


def test_weights_of_the_same_name_size_and_times_are_not_taken_for_those_that_were_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `cp -p`, `rsync -t` and layers of images leave them."""
    monkeypatch.setattr("minisgl_backend.models.load._LEAST_KEPT_BYTES", 0)
    folder, other = (write_random_llama(tmp_path / f"model {seed}", seed=seed) for seed in (1, 2))
    load(folder, tmp_path)
    file = folder / "model.safetensors"
    state = file.stat()
    file.write_bytes((other / file.name).read_bytes())
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert file.stat().st_size == state.st_size
    replaced, said = load(folder, tmp_path)
    assert said[0] == "packing weights, once"
    expected, _ = load(other, tmp_path)
    x = torch.ones(1, 32)
    assert torch.equal(replaced.layers[0].attention.qkv(x), expected.layers[0].attention.qkv(x))


def test_quantised_products_stay_what_they_are(tmp_path: Path) -> None:
    model, said = load(write_random_llama(tmp_path / "model"), tmp_path, quantization="int8")
    assert said == ["quantised weights are multiplied by torch, so decode steps are not recorded"]
    assert products(model) == {"StoredLinear"} and isinstance(model.layers[0].attention.o, StoredLinear)
    assert isinstance(model.lm_head, NativeLinear), "the head is not quantised"


def test_a_small_model_is_packed_into_memory(tmp_path: Path) -> None:
    model, said = load(write_random_llama(tmp_path / "model"), tmp_path / "cache")
    assert products(model) == {"NativeLinear"} and said == [] and not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("kind", "quantised"), [("F32", False), ("Q8_0", True)])
def test_of_a_gguf_file_that_stays_as_it_is_only_quantised_weights_are_torchs(
    tmp_path: Path, kind: str, quantised: bool
) -> None:
    folder = write_random_llama(tmp_path / "model", intermediate_size=64, rms_norm_eps=1e-5)
    file = tmp_path / "model.gguf"
    write_gguf(folder, file, matrices_as(gguf.GGMLQuantizationType[kind]))
    model, said = load(file, tmp_path, quantization="gguf")
    assert products(model) == {"StoredLinear" if quantised else "NativeLinear"}
    assert [line.startswith("quantised weights are multiplied by torch") for line in said] == [True] * quantised


def test_experts_are_torchs_and_it_is_said_so(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
    named = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    model, said = load(write_random_llama(tmp_path / "model", **named, **experts), tmp_path)
    assert said == ["experts are multiplied by torch, so decode steps are not recorded"]
    assert isinstance(model.layers[0].attention.o, NativeLinear)


def test_products_in_fp16_are_torchs(tmp_path: Path) -> None:
    model, said = load(write_random_llama(tmp_path / "model"), tmp_path, dtype="float16")
    assert said == ["float16 weights are multiplied by torch, so decode steps are not recorded"]
    assert products(model) == {"Linear"} and isinstance(model.lm_head, Linear)


def test_other_weights_dtypes_and_folders_have_files_of_their_own(tmp_path: Path) -> None:
    one, two = (write_random_llama(tmp_path / name) for name in ("one", "two"))

    def path(folder: Path, dtype: torch.dtype = torch.float32, quantization: str = "none") -> Path:
        return packed_path(tmp_path, folder, dtype, quantization)

    paths = [path(one), path(two), path(one, torch.bfloat16), path(one, quantization="int8")]
    assert path(one) == paths[0]
    os.utime(one / "model.safetensors", ns=(1, 1))
    assert len({path(one), *paths}) == 5


def test_what_was_packed_of_a_models_former_weights_goes_after_a_day_and_of_others_after_a_month(
    tmp_path: Path,
) -> None:
    folder = write_random_llama(tmp_path / "model")

    def packed(dtype: torch.dtype = DTYPE, days_ago: float = 0) -> Path:
        path = packed_path(tmp_path, folder, dtype, "none")
        with open_packed(path) as store:
            take(store)
        os.utime(path, (then := time.time() - days_ago * 86400, then))
        return path

    former, other, forgotten = packed(days_ago=2), packed(torch.bfloat16, 2), packed(torch.float16, 31)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    today = packed()
    assert [path.exists() for path in (former, other, forgotten, today)] == [False, True, False, True]
    os.utime(folder / "model.safetensors", ns=(2, 2))
    assert packed().exists() and today.exists(), "perhaps of another machine that sees another model there"


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, named = tmp_path / "a.bin", list[bool]()
    monkeypatch.setattr(os, "fsync", lambda handle: named.append(path.exists()))
    with open_packed(path) as store:
        take(store)
    assert named == [False] and path.exists()
