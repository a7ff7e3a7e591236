"""One NVIDIA GPU as a device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

from minisgl_backend.device.cuda_graphs import CudaRecorder
from minisgl_backend.device.cuda_streams import CudaStreams
from minisgl_backend.device.graph import Recorder
from minisgl_backend.device.machine import default_threads
from minisgl_backend.device.streams import Streams
from minisgl_backend.errors import ConfigError

_SPARE_BYTES = 256 << 20  # kernels loaded later, allocator fragmentation


class CudaDevice:
    """Makes the GPU current for this process when opened. Raises ConfigError when it is not there."""

    def __init__(self, index: int, threads: int = 0) -> None:
        if not cuda_present():
            raise ConfigError(
                f"setting 'device' asks for cuda:{index}, but torch {torch.__version__} sees no CUDA device here; "
                "use 'auto' or 'cpu', or install a CUDA build of torch and a driver"
            )
        if index >= torch.cuda.device_count():
            raise ConfigError(
                f"setting 'device' asks for cuda:{index}, but there are only {torch.cuda.device_count()} CUDA devices"
            )
        torch.set_num_threads(threads or default_threads())
        torch.cuda.set_device(index)
        self._index = index
        self.streams: Streams = CudaStreams(index)
        self._recording = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]

    @property
    def name(self) -> str:
        return f"cuda:{self._index} ({torch.cuda.get_device_name(self._index)})"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", self._index)

    @property
    def capability(self) -> tuple[int, int]:
        return torch.cuda.get_device_capability(self._index)

    def free_memory_bytes(self) -> int:
        """What the driver has free, and what torch holds for later use without using it."""
        free, _ = torch.cuda.mem_get_info(self._index)
        unused = torch.cuda.memory_reserved(self._index) - torch.cuda.memory_allocated(self._index)
        return int(free) + int(unused)

    def total_memory_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._index)[1])

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._index)

    def recorder(self) -> Recorder:
        """See Device."""
        return CudaRecorder(self._index, self._recording)

    def automatic_dtype(self, checkpoint: torch.dtype) -> torch.dtype:
        """The checkpoint's own, when it has 16 bits; else bf16, or fp16 on GPUs older than Ampere."""
        half = torch.bfloat16 if self._computes_bf16() else torch.float16
        if checkpoint == torch.float16:
            return checkpoint
        return half

    def check_dtype(self, dtype: torch.dtype) -> None:
        if dtype == torch.bfloat16 and not self._computes_bf16():
            raise ConfigError(f"setting 'dtype' asks for bf16, which {self.name} can not compute in; use fp16 or fp32")

    def peak_memory_bytes(self, work: Callable[[], None]) -> int:
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self._index)
        before = torch.cuda.memory_allocated(self._index)
        work()
        self.synchronize()
        peak = torch.cuda.max_memory_allocated(self._index) - before
        torch.cuda.empty_cache()
        return int(peak)

    def reserve_memory(self, size_bytes: int) -> None:
        """See Device: what was taken and given back stays torch's own. Less than that where there is less.

        What torch has beyond what is in use goes back first: it would come on top, beyond this engine's share.
        """
        torch.cuda.empty_cache()
        with suppress(torch.OutOfMemoryError):
            torch.empty(size_bytes, dtype=torch.uint8, device=self.torch_device)

    def kv_pool_bytes(self, *, utilization: float, peak_bytes: int, useful_bytes: int) -> int:
        """What is left of this process's own share `utilization` of the GPU after its weights and the peak, and no
        more than is free: engines side by side add their shares up, and one that comes too late gets the rest.

        Not capped by useful_bytes: pages beyond it hold the prefix cache.
        """
        share = int(self.total_memory_bytes() * utilization) - torch.cuda.memory_allocated(self._index)
        return min(share, self.free_memory_bytes()) - peak_bytes - _SPARE_BYTES

    def _computes_bf16(self) -> bool:
        return self.capability >= (8, 0)


def cuda_present() -> bool:
    """Whether this torch can reach at least one CUDA device."""
    return torch.cuda.is_available() and torch.cuda.device_count() > 0
