"""Which attention backends serve a model on a GPU: by the setting, by what the GPU can, by the packages there are.

Where it stands in the flow: kernel_choice.py asks for it on CUDA, before the weights are read, and builds backends with
it when there is a pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

from minisgl_backend.attention.flashinfer_phases import FlashInferPhases, flashinfer_obstacle
from minisgl_backend.attention.interface import AttentionBackend, AttentionVariant
from minisgl_backend.attention.phases import DecodeBackend, PhaseBackend
from minisgl_backend.attention.torch_backend import TorchAttention
from minisgl_backend.config import parse_attention
from minisgl_backend.device.staging import Staging
from minisgl_backend.device.streams import Streams
from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.gpu.flashinfer import FlashInfer, FlashInferMissing, load_flashinfer
from minisgl_backend.kvpool.paged import PagedKvPool

LEAST_CAPABILITY = (8, 0)  # of Triton


@dataclass(frozen=True, slots=True)
class GpuAttentionChoice:
    """What the setting `attention` comes to on this GPU, for any model."""

    setting: str
    triton_missing: str  # why our kernels can not be had; empty: they can
    flashinfer: FlashInfer | str  # or why it can not be had
    streams: Streams
    progress: Callable[[str], None]
    _told: set[str] = field(default_factory=set)  # a model's backends are built twice, for memory to be measured first

    def build(self, pool: PagedKvPool, variants: Sequence[AttentionVariant], heads: int) -> AttentionBackend:
        """variants: of each layer. heads: of queries. Raises ConfigError: who was asked for can not serve the model."""
        if self.setting == "torch":
            return TorchAttention(pool, variants)
        names = parse_attention(self.setting)
        if self.setting == "auto":
            names = (self._automatic(pool, variants),) * 2
            if names[0] == "torch":
                return TorchAttention(pool, variants)
        for name in names:
            if obstacle := self._obstacle(name, pool, variants):
                raise ConfigError(f"setting 'attention' is {self.setting}, but {obstacle}")
        self._tell(f"attention: {names[0]} for prompts, {names[1]} for decode rows")
        return self._build(names, pool, variants, heads)

    def _tell(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self.progress(line)

    def _automatic(self, pool: PagedKvPool, variants: Sequence[AttentionVariant]) -> str:
        obstacle = self._obstacle("flashinfer", pool, variants)
        if not obstacle and any(variant.window or variant.softcap for variant in variants):
            obstacle = "layers have windows or soft-caps (docs/configuration.md)"
        if not obstacle:
            return "flashinfer"
        if not (unserved := self._obstacle("triton", pool, variants)):
            self._tell(f"attention without flashinfer: {obstacle}")
            return "triton"
        self._tell(f"attention by torch, several times slower: {unserved}")
        return "torch"

    def _obstacle(self, name: str, pool: PagedKvPool, variants: Sequence[AttentionVariant]) -> str:
        """Why a backend can not serve the model here; empty: it can."""
        if self.triton_missing:  # which writes keys and values for both
            return self.triton_missing
        if name == "triton":
            from minisgl_backend.attention.triton_phases import triton_obstacle  # imports Triton

            return triton_obstacle(pool)
        return self.flashinfer if isinstance(self.flashinfer, str) else flashinfer_obstacle(pool, variants)

    def _build(
        self, names: tuple[str, str], pool: PagedKvPool, variants: Sequence[AttentionVariant], heads: int
    ) -> AttentionBackend:
        """names: of prompts' and of decode rows' backend, which can serve the model."""
        from minisgl_backend.attention.gpu_backend import GpuAttention  # imports Triton
        from minisgl_backend.attention.triton_phases import TritonChunks, TritonDecode

        chunks: PhaseBackend | None = None
        decode: DecodeBackend | None = None
        if "flashinfer" in names:
            assert isinstance(self.flashinfer, FlashInfer)
            phases = FlashInferPhases(pool, variants, heads, self.flashinfer, self.streams.mark)
            chunks, decode = phases.chunks, phases.decode
        if names[0] == "triton":
            chunks = TritonChunks(pool, variants, heads)
        if names[1] == "triton":
            decode = TritonDecode(pool, variants)
        assert chunks is not None and decode is not None
        upload = Staging(self.streams).upload
        return GpuAttention(pool, variants, chunks=chunks, decode=decode, upload=upload)


def choose_gpu_attention(
    setting: str,
    capability: tuple[int, int],
    streams: Streams,
    progress: Callable[[str], None],
    load: Callable[[tuple[int, int]], FlashInfer] = load_flashinfer,
) -> GpuAttentionChoice:
    """setting: `attention`. capability: of the GPU, "compute capability". Loads FlashInfer where it is wanted.

    Raises ConfigError: what was asked for can not be had here, whatever the model.
    """
    if setting == "native":
        raise ConfigError("setting 'attention' is native, which is for a CPU, but the device is a GPU")
    names = parse_attention(setting)
    missing = triton_missing(capability) if setting != "torch" else ""
    flashinfer: FlashInfer | str = "nobody asked for it"
    if not missing and {"auto", "flashinfer"} & set(names):
        try:
            flashinfer = load(capability)
        except FlashInferMissing as error:
            flashinfer = str(error)
            missing = missing if setting == "auto" else flashinfer
    if missing and setting != "auto":
        raise ConfigError(f"setting 'attention' is {setting}, but {missing}")
    return GpuAttentionChoice(setting, missing, flashinfer, streams, progress)


def triton_missing(capability: tuple[int, int]) -> str:
    """Why Triton can not be used on a GPU; empty: it can."""
    if capability < LEAST_CAPABILITY:
        return "the GPU is of capability {}.{}, and Triton needs 8.0".format(*capability)
    return "" if find_spec("triton") is not None else "the package triton is not installed"
