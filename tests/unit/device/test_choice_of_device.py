"""Which device and dtype the settings mean, and how much of the memory the pool may take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl_backend.device import cpu, cuda, device, machine
from minisgl_backend.device.cpu import CpuDevice
from minisgl_backend.device.device import open_device, resolve_dtype
from minisgl_backend.errors import ConfigError


@pytest.fixture(autouse=True)
def _keep_threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def _no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "cuda_present", lambda: False)
    monkeypatch.setattr(device, "cuda_present", lambda: False)


@pytest.mark.usefixtures("_no_cuda")
def test_auto_is_the_cpu_where_there_is_no_gpu() -> None:
    assert open_device("auto").torch_device == torch.device("cpu")


@pytest.mark.usefixtures("_no_cuda")
@pytest.mark.parametrize("setting", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_one_clear_sentence(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"'device' asks for cuda:\d, but torch .* sees no CUDA device"):
        open_device(setting)


@pytest.mark.parametrize("setting", ["gpu", "cuda:", "cuda:x", "CPU", "", "fake"])
def test_another_word_is_refused_with_the_known_ones(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"'device' must be 'auto', 'cpu', 'cuda', 'cuda:N'"):
        open_device(setting)


def test_threads_are_those_of_the_setting_or_of_the_machine() -> None:
    open_device("cpu", threads=3)
    assert torch.get_num_threads() == 3
    open_device("cpu")
    assert torch.get_num_threads() == machine.default_threads()


@pytest.mark.parametrize(
    ("native", "checkpoint", "expected"),
    [
        (True, torch.bfloat16, torch.bfloat16),
        (False, torch.bfloat16, torch.float32),
        (True, torch.float32, torch.float32),
        (True, torch.float16, torch.float32),
    ],
)
def test_auto_computes_bf16_on_a_cpu_only_where_the_processor_does(
    native: bool, checkpoint: torch.dtype, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "has_native_bf16", lambda: native)
    assert resolve_dtype(CpuDevice(), "auto", checkpoint) == expected


def test_a_named_dtype_wins_over_the_checkpoint() -> None:
    assert resolve_dtype(CpuDevice(), "fp16", torch.float32) == torch.float16
    assert resolve_dtype(CpuDevice(), "bf16", torch.float32) == torch.bfloat16


def test_flags_are_read_from_cpuinfo_of_either_kind(tmp_path: Path) -> None:
    x86, arm = tmp_path / "x86", tmp_path / "arm"
    x86.write_text("model name\t: X\nflags\t\t: fpu avx512_bf16 amx_tile\n")
    arm.write_text("Features\t: fp asimd bf16\n")
    assert "avx512_bf16" in machine._cpu_flags(x86)
    assert machine._cpu_flags(arm) == {"fp", "asimd", "bf16"}
    assert machine._cpu_flags(tmp_path / "none") == frozenset()


def test_the_cpu_pool_is_the_smallest_of_need_share_and_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 1 << 30
    opened = CpuDevice()
    monkeypatch.setattr(opened, "free_memory_bytes", lambda: 8 * gib)
    assert opened.kv_pool_bytes(utilization=0.9, peak_bytes=0, useful_bytes=gib) == gib
    assert opened.kv_pool_bytes(utilization=0.9, peak_bytes=0, useful_bytes=10 * gib) == 2 * gib
    assert opened.kv_pool_bytes(utilization=0.9, peak_bytes=4 * gib, useful_bytes=10 * gib) == gib
    assert opened.kv_pool_bytes(utilization=0.9, peak_bytes=9 * gib, useful_bytes=10 * gib) == 0
    monkeypatch.setattr(opened, "free_memory_bytes", lambda: 64 * gib)
    assert opened.kv_pool_bytes(utilization=0.9, peak_bytes=0, useful_bytes=10 * gib) == 4 * gib


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A GPU of 100 GiB as torch tells of it, in GiB: what this process holds and what all others do."""
    held = {"ours": 0, "theirs": 0}
    gib = 1 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: ((100 - sum(held.values())) * gib, 100 * gib))
    for name in ("memory_allocated", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda index: held["ours"] * gib)
    return held


def gpu_pool_gib(utilization: float, peak: int = 0) -> float:
    opened = object.__new__(cuda.CudaDevice)  # there is none to open
    opened._index = 0
    return opened.kv_pool_bytes(utilization=utilization, peak_bytes=peak << 30, useful_bytes=1) / (1 << 30) + 0.25


def test_engines_side_by_side_on_a_gpu_each_get_their_own_share(gpu: dict[str, int]) -> None:
    gpu["ours"] = 10
    assert gpu_pool_gib(0.45, peak=5) == pytest.approx(30)
    gpu["theirs"] = 45
    assert gpu_pool_gib(0.45, peak=5) == pytest.approx(30), "what a neighbour holds is no part of our share"


def test_an_engine_whose_share_is_taken_by_others_gets_what_is_left_and_never_more(gpu: dict[str, int]) -> None:
    gpu.update(ours=5, theirs=90)
    assert gpu_pool_gib(0.9, peak=2) == pytest.approx(3)
    gpu.update(theirs=95)
    assert gpu_pool_gib(0.9, peak=2) < 0, "refused by pages_in, with a sentence"


def test_free_memory_is_positive_and_within_the_total() -> None:
    opened = CpuDevice()
    assert 0 < opened.free_memory_bytes() <= opened.total_memory_bytes()


@pytest.mark.gpu
def test_the_gpu_meters_what_a_piece_of_work_takes() -> None:
    opened = open_device("cuda")

    def work() -> None:
        torch.empty(64 << 20, dtype=torch.uint8, device=opened.torch_device)

    assert opened.peak_memory_bytes(work) == 64 << 20
    assert 0 < opened.free_memory_bytes() < opened.total_memory_bytes()
