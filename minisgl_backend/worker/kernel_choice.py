"""Which kernels a worker computes with: decided once, from the settings, the device and what this machine can build.

Where it stands in the flow: asked while a runner is built. torch's are right everywhere; on a CPU there are our own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minisgl_backend.attention.interface import AttentionBackend, AttentionVariant, RecordableAttention
from minisgl_backend.attention.native_backend import NativeAttention, native_obstacle
from minisgl_backend.attention.torch_backend import TorchAttention
from minisgl_backend.config import EngineConfig
from minisgl_backend.device.device import Device
from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.native.build import BuildFailed
from minisgl_backend.kernels.native.kernels import NativeKernels
from minisgl_backend.kernels.native.library import Library, open_library
from minisgl_backend.kernels.native.recording import NativeRecorder
from minisgl_backend.kvpool.paged import PagedKvPool
from minisgl_backend.models.load import NativeLoad
from minisgl_backend.models.locate import cache_folder
from minisgl_backend.models.model import Model
from minisgl_backend.worker.decode_graphs import DecodeGraphs, graph_sizes

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """What the settings `kernels`, `attention` and `decode_graphs` come to on this machine."""

    config: EngineConfig
    device: Device
    library: Library | None  # None: torch's kernels
    progress: Progress

    @property
    def told(self) -> str:
        """For the operator, behind the dtype; empty: torch's."""
        return "" if self.library is None else f", native kernels ({self.library.level.name})"

    def native_load(self) -> NativeLoad | None:
        """For load_model."""
        if self.library is None:
            return None
        product = self.library.ops.linear.default
        return NativeLoad(NativeKernels(self.library), product, cache_folder(), self.progress)

    def attention(self, pool: PagedKvPool, variants: Sequence[AttentionVariant]) -> AttentionBackend:
        """Raises ConfigError: the backend that was asked for can not serve this model here."""
        if self.config.attention == "torch":
            return TorchAttention(pool, variants)
        if self.library is None:
            obstacle = "there are no kernels of our own here"
        elif obstacle := native_obstacle(pool):
            if self.config.attention == "auto":
                self.progress(f"attention by torch: native kernels do not serve this model, {obstacle}")
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
    """Builds and loads the native library where it is wanted. Raises ConfigError."""
    on_cpu = device.torch_device.type == "cpu"
    if config.kernels == "native" and not on_cpu:
        raise ConfigError(f"setting 'kernels' is native, which are for a CPU, but the device is {device.name}")
    wanted = on_cpu and config.kernels != "torch"
    return KernelChoice(config, device, _library(config, progress) if wanted else None, progress)


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
