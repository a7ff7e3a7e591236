"""What the settings `kernels`, `attention` and `decode_graphs` come to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fakes.attention_backends import native_library
from fakes.emulated_graph import EmulatedRecorder
from fakes.planned_attention import PlannedAttention
from minisgl_backend.attention.interface import AttentionVariant
from minisgl_backend.attention.native_backend import NativeAttention
from minisgl_backend.attention.torch_backend import TorchAttention
from minisgl_backend.config import EngineConfig, resolve_config
from minisgl_backend.device.cpu import CpuDevice
from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.native.levels import LEVEL_VARIABLE
from minisgl_backend.kernels.torch_kernels import TORCH_KERNELS
from minisgl_backend.kvpool.paged import KvShape, PagedKvPool
from minisgl_backend.models.load import LoadKernels
from minisgl_backend.sampling.draw import TorchDraw
from minisgl_backend.worker.kernel_choice import KernelChoice, choose_kernels

VARIANTS = (AttentionVariant(0.25),)


def config(**settings: Any) -> EngineConfig:
    return resolve_config({"device": "cpu", **settings})


def pool(head_dim: int) -> PagedKvPool:
    return PagedKvPool(KvShape(1, 2, head_dim, torch.float32), 4, 16, torch.device("cpu"))


def choose(lines: list[str], **settings: Any) -> KernelChoice:
    native_library()  # is built, so that no test waits for it
    return choose_kernels(config(**settings), CpuDevice(1), lines.append)


def test_native_kernels_are_taken_where_they_can_be_had() -> None:
    lines: list[str] = []
    choice = choose(lines)
    assert choice.library is not None and choice.load().packing is not None
    assert not lines and choice.told == f", native kernels ({choice.library.level.name})"
    assert isinstance(choice.attention(pool(16), VARIANTS, 2), NativeAttention)


@pytest.mark.parametrize("settings", [{"kernels": "torch"}, {"attention": "torch"}])
def test_torchs_are_taken_when_they_are_asked_for(settings: dict[str, str]) -> None:
    choice = choose([], **settings)
    assert isinstance(choice.attention(pool(16), VARIANTS, 2), TorchAttention)
    assert (choice.library is None) == ("kernels" in settings)


def test_a_model_that_native_attention_does_not_serve_is_served_by_torchs_and_told() -> None:
    lines: list[str] = []
    choice = choose(lines)
    assert isinstance(choice.attention(pool(8), VARIANTS, 2), TorchAttention)
    assert "so decode steps are not recorded" in lines[-1] and "head_dim is 8" in lines[-1]
    with pytest.raises(ConfigError, match="setting 'attention' is native, but head_dim is 8"):
        choose([], attention="native").attention(pool(8), VARIANTS, 2)


def test_a_machine_without_native_kernels_serves_by_torchs_and_refuses_who_insists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(LEVEL_VARIABLE, "none")
    lines: list[str] = []
    choice = choose_kernels(config(), CpuDevice(1), lines.append)
    assert (
        choice.library is None
        and choice.load() == LoadKernels(TORCH_KERNELS)
        and not choice.told
        and "several times slower" in lines[-1]
    )
    assert isinstance(choice.attention(pool(16), VARIANTS, 2), TorchAttention)
    with pytest.raises(ConfigError, match="setting 'kernels' is native, but"):
        choose_kernels(config(kernels="native"), CpuDevice(1), lines.append)
    with pytest.raises(ConfigError, match="setting 'attention' is native, but there are no kernels of our own"):
        choose_kernels(config(attention="native"), CpuDevice(1), lines.append).attention(pool(16), VARIANTS, 2)


@pytest.mark.parametrize("settings", [{"decode_graphs": False}, {"kernels": "torch"}, {"attention": "torch"}])
def test_steps_are_not_recorded_when_they_are_not_to_be_or_can_not_be(settings: dict[str, Any]) -> None:
    choice = choose([], **settings)
    attention = choice.attention(pool(16), VARIANTS, 2)
    assert choice.graphs(None, attention, 4, 8, 4) is None  # type: ignore[arg-type]


class _Recording(CpuDevice):
    """As a GPU does."""

    def recorder(self) -> EmulatedRecorder:  # type: ignore[override]
        return EmulatedRecorder()


def test_a_device_that_records_by_itself_records_every_size_at_the_start_where_attention_can_be_recorded() -> None:
    choice = choose_kernels(config(kernels="torch"), _Recording(1), lambda line: None)
    recordable = PlannedAttention(pool(16), VARIANTS)
    graphs = choice.graphs(None, recordable, 6, 8, 4)  # type: ignore[arg-type]
    assert graphs is not None and graphs._at_start == (6, 4, 3, 2, 1)
    assert choice.graphs(None, TorchAttention(pool(16), VARIANTS), 6, 8, 4) is None  # type: ignore[arg-type]


class _Gpu(CpuDevice):
    """As far as the choice looks at one."""

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        super().__init__(1)
        self._capability = capability

    @property
    def name(self) -> str:
        return "cuda:0 (a GPU)"

    @property
    def capability(self) -> tuple[int, int]:
        return self._capability

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


@pytest.mark.parametrize("kernels", ["auto", "triton"])
def test_a_gpu_gets_our_kernels_in_triton(kernels: str) -> None:
    lines: list[str] = []
    choice = choose_kernels(config(kernels=kernels), _Gpu(), lines.append)
    assert type(choice.layers).__name__ == "TritonKernels" and choice.load() == LoadKernels(choice.layers)
    assert choice.told == ", Triton kernels" and choice.library is None and not lines


def test_tokens_are_drawn_by_the_kernels_that_layers_compute_with() -> None:
    def upload(arrays: Sequence[Any]) -> list[torch.Tensor]:
        raise AssertionError("nothing is sent before a step")

    native = choose([])
    assert native.library is not None
    assert native.draw(upload) == TorchDraw(native.library.ops.best_of_rows.default)
    assert choose([], kernels="torch").draw(upload) == TorchDraw()
    assert choose_kernels(config(kernels="torch"), _Gpu(), lambda line: None).draw(upload) == TorchDraw()
    assert type(choose_kernels(config(), _Gpu(), lambda line: None).draw(upload)).__name__ == "TritonDraw"


def test_a_gpu_gets_torchs_kernels_when_they_are_asked_for() -> None:
    choice = choose_kernels(config(kernels="torch"), _Gpu(), lambda line: None)
    assert choice.load() == LoadKernels(TORCH_KERNELS) and not choice.told


def test_a_gpu_that_triton_does_not_serve_gets_torchs_kernels_and_refuses_who_insists() -> None:
    lines: list[str] = []
    choice = choose_kernels(config(), _Gpu((7, 5)), lines.append)
    assert choice.layers is TORCH_KERNELS
    assert any("the GPU is of capability 7.5, and Triton needs 8.0" in line for line in lines)
    with pytest.raises(ConfigError, match=r"setting 'kernels' is triton, but the GPU is of capability 7\.5"):
        choose_kernels(config(kernels="triton"), _Gpu((7, 5)), lines.append)


def test_kernels_of_the_other_kind_of_device_are_refused() -> None:
    with pytest.raises(ConfigError, match="setting 'kernels' is triton, which are for a GPU, but the device is cpu"):
        choose_kernels(config(kernels="triton"), CpuDevice(1), lambda line: None)
    with pytest.raises(ConfigError, match="setting 'kernels' is native, which are for a CPU, but the device is cuda"):
        choose_kernels(config(kernels="native"), _Gpu(), lambda line: None)


@pytest.mark.parametrize("attention", ["triton", "flashinfer", "triton,flashinfer"])
def test_attention_of_a_gpu_is_refused_on_a_cpu(attention: str) -> None:
    with pytest.raises(
        ConfigError, match=f"setting 'attention' is {attention}, which is for a GPU, but the device is cpu"
    ):
        choose_kernels(config(attention=attention), CpuDevice(1), lambda line: None)


def test_attention_of_a_cpu_is_refused_on_a_gpu() -> None:
    with pytest.raises(ConfigError, match="setting 'attention' is native, which is for a CPU, but the device is a GPU"):
        choose_kernels(config(attention="native"), _Gpu(), lambda line: None)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "GpuAttention"),
        ({"attention": "triton"}, "GpuAttention"),
        ({"kernels": "torch"}, "TorchAttention"),
        ({"kernels": "torch", "attention": "triton"}, "GpuAttention"),
        ({"attention": "torch"}, "TorchAttention"),
    ],
)
def test_attention_on_a_gpu_is_torchs_when_all_kernels_are_to_be_or_it_alone(
    settings: dict[str, str], expected: str
) -> None:
    choice = choose_kernels(config(**settings), _Gpu(), lambda line: None)
    assert type(choice.attention(pool(16), VARIANTS, 2)).__name__ == expected
