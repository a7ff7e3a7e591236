"""What the setting `attention` comes to on a GPU, over a pool that lies on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes import flashinfer as fake
from minisgl_backend.attention.flashinfer_phases import FlashInferChunks, FlashInferDecode
from minisgl_backend.attention.interface import AttentionBackend, AttentionVariant
from minisgl_backend.attention.torch_backend import TorchAttention
from minisgl_backend.device.streams import HostStreams
from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.gpu.flashinfer import FlashInfer, FlashInferMissing, kernels_missing, load_flashinfer
from minisgl_backend.kvpool.paged import KvShape, PagedKvPool
from minisgl_backend.worker import attention_choice
from minisgl_backend.worker.attention_choice import GpuAttentionChoice, choose_gpu_attention

pytest.importorskip("triton")

PLAIN = [AttentionVariant(0.125)]
WINDOW = [AttentionVariant(0.125), AttentionVariant(0.125, window=128)]
SINKS = [AttentionVariant(0.125, sinks=True)]
HOPPER = (9, 0)


def pool(head_dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> PagedKvPool:
    return PagedKvPool(KvShape(2, 2, head_dim, dtype), 4, 16, torch.device("cpu"))


def there(capability: tuple[int, int]) -> FlashInfer:
    wrappers = fake.BatchPrefillWithPagedKVCacheWrapper, fake.BatchDecodeWithPagedKVCacheWrapper
    return FlashInfer("fake", *wrappers)


def absent(capability: tuple[int, int]) -> FlashInfer:
    raise FlashInferMissing("the package flashinfer is not installed")


def choose(
    setting: str, lines: list[str] | None = None, *, capability: tuple[int, int] = HOPPER, load: Any = there
) -> GpuAttentionChoice:
    tell = [].append if lines is None else lines.append
    return choose_gpu_attention(setting, capability, HostStreams(), tell, load)


def build(
    choice: GpuAttentionChoice, variants: Sequence[AttentionVariant] = PLAIN, **shape: Any
) -> tuple[AttentionBackend, str, str]:
    """→ the backend, and of which kind its phases are."""
    attention = choice.build(pool(**shape), variants, 8)
    if isinstance(attention, TorchAttention):
        return attention, "torch", "torch"
    phases = (attention._chunks, attention._decode)  # type: ignore[attr-defined]
    kinds = ["flashinfer" if isinstance(phase, FlashInferChunks | FlashInferDecode) else "triton" for phase in phases]
    return attention, kinds[0], kinds[1]


@pytest.mark.parametrize("chunks", ["triton", "flashinfer"])
@pytest.mark.parametrize("decode", ["triton", "flashinfer"])
def test_prompts_and_decode_rows_have_a_backend_each(chunks: str, decode: str) -> None:
    lines: list[str] = []
    assert build(choose(f"{chunks},{decode}", lines))[1:] == (chunks, decode)
    assert lines == [f"attention: {chunks} for prompts, {decode} for decode rows"]


@pytest.mark.parametrize("name", ["triton", "flashinfer", "torch"])
def test_one_name_is_that_of_both(name: str) -> None:
    assert build(choose(name))[1:] == (name, name)


@pytest.mark.parametrize(
    ("variants", "shape", "expected", "told"),
    [
        (PLAIN, {}, "flashinfer", "flashinfer for prompts"),
        (WINDOW, {}, "triton", "layers have windows or soft-caps"),
        (SINKS, {}, "triton", "sinks"),
        (PLAIN, {"head_dim": 80}, "triton", "head_dim is 80"),
        (PLAIN, {"dtype": torch.float32}, "triton", "float32"),
        (PLAIN, {"head_dim": 320}, "torch", "several times slower: head_dim is 320"),
    ],
    ids=str,
)
def test_auto_takes_the_first_that_serves_the_model_and_tells_why_not_the_others(
    variants: list[AttentionVariant], shape: dict[str, Any], expected: str, told: str
) -> None:
    lines: list[str] = []
    assert build(choose("auto", lines), variants, **shape)[1:] == (expected, expected)
    assert any(told in line for line in lines)


def test_auto_does_without_packages_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    assert build(choose("auto", lines, load=absent))[1] == "triton"
    assert "attention without flashinfer: the package flashinfer is not installed" in lines
    assert build(choose("auto", lines, capability=(7, 5)))[1] == "torch"
    assert lines[-1] == "attention by torch, several times slower: the GPU is of capability 7.5, and Triton needs 8.0"
    monkeypatch.setattr(attention_choice, "find_spec", lambda name: None)
    assert build(choose("auto", lines))[1] == "torch"
    assert "the package triton is not installed" in lines[-1]


@pytest.mark.parametrize(
    ("setting", "options", "says"),
    [
        ("native", {}, "is native, which is for a CPU"),
        ("flashinfer", {"load": absent}, "is flashinfer, but the package flashinfer is not installed"),
        ("flashinfer,triton", {"load": absent}, "is flashinfer,triton, but the package flashinfer"),
        ("triton", {"capability": (7, 0)}, "is triton, but the GPU is of capability 7.0"),
        ("flashinfer", {"capability": (7, 0)}, "is flashinfer, but the GPU is of capability 7.0"),
    ],
)
def test_who_insists_on_what_the_machine_has_not_is_told_before_weights_are_read(
    setting: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=f"setting 'attention' {says}"):
        choose(setting, **options)


@pytest.mark.parametrize(
    ("setting", "variants", "shape", "says"),
    [
        ("flashinfer", SINKS, {}, "layers have attention sinks"),
        ("triton,flashinfer", PLAIN, {"head_dim": 80}, "head_dim is 80, and it takes 64, 128, 256"),
        ("flashinfer,triton", PLAIN, {"dtype": torch.float32}, "keys and values are torch.float32"),
        ("triton", PLAIN, {"head_dim": 320}, "head_dim is 320"),
    ],
)
def test_who_insists_on_what_does_not_serve_the_model_is_told(
    setting: str, variants: list[AttentionVariant], shape: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=f"setting 'attention' is {setting}, but {says}"):
        build(choose(setting), variants, **shape)


def test_windows_are_served_by_flashinfer_for_who_asks_for_it() -> None:
    assert build(choose("flashinfer"), WINDOW)[1:] == ("flashinfer", "flashinfer")


def test_flashinfer_that_is_not_installed_or_not_for_the_gpu_is_missing() -> None:
    with pytest.raises(FlashInferMissing, match=r"capability 7\.5, and it needs 8\.0"):
        load_flashinfer((7, 5))
    try:
        import flashinfer  # noqa: F401
    except ImportError:
        with pytest.raises(FlashInferMissing, match=r"flashinfer.*is not installed|can not be imported"):
            load_flashinfer(HOPPER)


def test_flashinfer_without_kernels_and_without_a_compiler_is_as_good_as_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would only say so with the first step of an engine that could have done without it."""
    monkeypatch.setattr("minisgl_backend.kernels.gpu.flashinfer._USUAL_HOME", str(tmp_path / "none"))
    nowhere = {"PATH": str(tmp_path), "CUDA_HOME": str(tmp_path)}
    assert "neither on the PATH nor below CUDA_HOME" in kernels_missing(nowhere)
    assert kernels_missing({**nowhere, "FLASHINFER_DISABLE_JIT": "1"}) == ""
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.touch(mode=0o755)
    assert kernels_missing(nowhere) == ""
    assert kernels_missing({"PATH": str(nvcc.parent)}) == ""
