"""Which kernels a worker computes with: decided once, from the settings, the device and what this machine can build.

Where it stands in the flow: asked while a runner is built. torch's are right everywhere; our own are in C++ for a CPU,
and in Triton for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minisgl_backend.attention.interface import AttentionBackend, AttentionVariant, RecordableAttention
from minisgl_backend.attention.native_backend import NativeAttention, native_obstacle
from minisgl_backend.attention.torch_backend import TorchAttention
from minisgl_backend.config import PHASES, EngineConfig, parse_attention
from minisgl_backend.device.device import Device
from minisgl_backend.device.staging import Upload
from minisgl_backend.distributed.gloo import GlooGroup
from minisgl_backend.distributed.group import RankGroup
from minisgl_backend.distributed.seat import Seat
from minisgl_backend.distributed.shared import SharedGroup
from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.interface import Kernels
from minisgl_backend.kernels.native.build import BuildFailed
from minisgl_backend.kernels.native.kernels import NativeKernels
from minisgl_backend.kernels.native.library import Library, open_library
from minisgl_backend.kernels.native.recording import NativeRecorder
from minisgl_backend.kernels.torch_kernels import TORCH_KERNELS
from minisgl_backend.kvpool.paged import PagedKvPool
from minisgl_backend.models.load import LoadKernels, Packing
from minisgl_backend.models.locate import cache_folder
from minisgl_backend.models.model import Model
from minisgl_backend.sampling.draw import PrepareDraw, TorchDraw
from minisgl_backend.worker.attention_choice import GpuAttentionChoice, choose_gpu_attention, triton_missing
from minisgl_backend.worker.decode_graphs import DecodeGraphs, graph_sizes

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """What the settings `kernels`, `attention` and `decode_graphs` come to on this machine."""

    config: EngineConfig
    device: Device
    library: Library | None  # of a CPU's own kernels
    layers: Kernels  # what a model's layers compute with
    gpu_attention: GpuAttentionChoice | None  # None: on a CPU
    progress: Progress

    @property
    def told(self) -> str:
        """For the operator, behind the dtype; empty: torch's."""
        if self.library is not None:
            return f", native kernels ({self.library.level.name})"
        return "" if self.layers is TORCH_KERNELS else ", Triton kernels"

    def draw(self, upload: Upload) -> PrepareDraw:
        """Who draws the tokens. upload: arrays of the host → tensors of the device, in one transfer."""
        if self.library is not None:
            return TorchDraw(self.library.ops.best_of_rows.default)
        if self.gpu_attention is None or self.layers is TORCH_KERNELS:
            return TorchDraw()
        from minisgl_backend.sampling.triton_draw import TritonDraw  # a gigabyte of compiler

        return TritonDraw(upload)

    def group(self, seat: Seat) -> RankGroup | None:
        """How this rank meets the others; None: there are none. Waits for them. Raises ConfigError."""
        if seat.ranks == 1:
            return None
        if self.device.torch_device.type != "cpu":
            raise ConfigError(
                f"setting 'tensor_parallel' is {seat.ranks}, but this version deals models out among processes on a "
                f"CPU alone, and the device is {self.device.name}"
            )
        if self.library is None:
            return GlooGroup(seat.rank, seat.ranks, seat.meeting)
        return SharedGroup(self.library, seat.rank, seat.ranks, seat.memory)

    def load(self) -> LoadKernels:
        """For load_model."""
        if self.library is None:
            return LoadKernels(self.layers)
        return LoadKernels(self.layers, Packing(self.library.ops.linear.default, cache_folder(), self.progress))

    def attention(self, pool: PagedKvPool, variants: Sequence[AttentionVariant], heads: int) -> AttentionBackend:
        """variants: of each layer. heads: of queries. Raises ConfigError: the backend that was asked for can not serve
        this model here.
        """
        if self.gpu_attention is not None:
            return self.gpu_attention.build(pool, variants, heads)
        if self.config.attention == "torch":
            return TorchAttention(pool, variants)
        if self.library is None:
            obstacle = "there are no kernels of our own here"
        elif obstacle := native_obstacle(pool):
            if self.config.attention == "auto":
                self.progress(
                    "attention by torch, so decode steps are not recorded: native kernels do not serve this model, "
                    f"{obstacle}"
                )
        else:
            return NativeAttention(pool, variants, self.library)
        if self.config.attention == "native":
            raise ConfigError(f"setting 'attention' is native, but {obstacle}")
        return TorchAttention(pool, variants)

    def graphs(
        self, model: Model, attention: AttentionBackend, max_running: int, table_pages: int, scratch_page: int
    ) -> DecodeGraphs | None:
        """table_pages: of a whole context. None: steps are not recorded."""
        if not self.config.decode_graphs or not isinstance(attention, RecordableAttention):
            return None
        if self.device.capability > (0, 0) and self.layers is TORCH_KERNELS and model.spec.moe is not None:
            self.progress("decode steps are not recorded: torch's experts ask the host who chose them")
            return None
        native = self.library if isinstance(attention, NativeAttention) else None
        recorder = self.device.recorder() if native is None else NativeRecorder(native)
        if recorder is None:
            return None
        sizes = graph_sizes(max_running)
        return DecodeGraphs(
            model,
            attention,
            recorder,
            sizes=sizes,
            at_start=sizes if recorder.shares_memory else (1, max_running),
            table_pages=table_pages,
            scratch_page=scratch_page,
            device=self.device.torch_device,
            tell=self.progress,
        )


def choose_kernels(config: EngineConfig, device: Device, progress: Progress) -> KernelChoice:
    """Builds and loads the native library, or Triton, where it is wanted. Raises ConfigError."""
    if device.torch_device.type != "cpu":
        layers, attention = _gpu_layers(config, device, progress), _gpu_attention(config, device, progress)
        return KernelChoice(config, device, None, layers, attention, progress)
    if config.kernels == "triton":
        raise ConfigError(f"setting 'kernels' is triton, which are for a GPU, but the device is {device.name}")
    if parse_attention(config.attention)[0] in PHASES:
        raise ConfigError(
            f"setting 'attention' is {config.attention}, which is for a GPU, but the device is {device.name}"
        )
    library = _library(config, progress) if config.kernels != "torch" else None
    layers = TORCH_KERNELS if library is None else NativeKernels(library)
    return KernelChoice(config, device, library, layers, None, progress)


def _gpu_attention(config: EngineConfig, device: Device, progress: Progress) -> GpuAttentionChoice:
    reference = config.attention == "auto" and config.kernels == "torch"
    setting = "torch" if reference else config.attention
    return choose_gpu_attention(setting, device.capability, device.streams, progress)


def _gpu_layers(config: EngineConfig, device: Device, progress: Progress) -> Kernels:
    if config.kernels == "native":
        raise ConfigError(f"setting 'kernels' is native, which are for a CPU, but the device is {device.name}")
    if config.kernels == "torch":
        return TORCH_KERNELS
    if missing := triton_missing(device.capability):
        if config.kernels == "triton":
            raise ConfigError(f"setting 'kernels' is triton, but {missing}")
        progress(f"torch's kernels are used, several times slower than our own: {missing}")
        return TORCH_KERNELS
    from minisgl_backend.kernels.gpu.kernels import TritonKernels  # a gigabyte of compiler

    return TritonKernels()


def _library(config: EngineConfig, progress: Progress) -> Library | None:
    reasons: list[str] = []

    def tell(line: str) -> None:
        reasons.append(line)
        progress(line)

    try:
        library = open_library(cache_folder(), tell)
    except BuildFailed as error:
        tell(f"our kernels could not be built, torch's are used, several times slower: {error}")
        library = None
    if library is None and config.kernels == "native":
        raise ConfigError(f"setting 'kernels' is native, but {reasons[-1] if reasons else 'they can not be had'}")
    return library
