"""The CPU as a device of the engine."""

from __future__ import annotations

from collections.abc import Callable

import torch

from minisgl_backend.device import machine
from minisgl_backend.device.machine import default_threads, has_native_bf16
from minisgl_backend.device.streams import HostStreams, Streams

_GIB = 1 << 30
_KV_SHARE = 0.25  # of the memory still free: the rest is for the page cache of mapped weights, and for Triton
_KV_CAP_BYTES = 4 * _GIB


class CpuDevice:
    """Sets torch's thread count of this process when opened: one device per process."""

    def __init__(self, threads: int = 0) -> None:
        torch.set_num_threads(threads or default_threads())
        self.streams: Streams = HostStreams()

    @property
    def name(self) -> str:
        capability = torch.backends.cpu.get_cpu_capability()
        return f"cpu ({capability}, {torch.get_num_threads()} threads)"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def capability(self) -> tuple[int, int]:
        return 0, 0

    def free_memory_bytes(self) -> int:
        return machine.free_memory_bytes()

    def total_memory_bytes(self) -> int:
        return machine.total_memory_bytes()

    def synchronize(self) -> None:
        """CPU work is done when its call returns."""

    def recorder(self) -> None:
        """None: who has native kernels records their calls (kernels/native/recording.py)."""

    def automatic_dtype(self, checkpoint: torch.dtype) -> torch.dtype:
        """fp32, except a bf16 checkpoint on a processor with bf16 dot or matrix instructions.

        Without them a bf16 product is converted on the fly: five times slower than fp32 at 32 rows on an AVX2 machine.
        """
        return torch.bfloat16 if checkpoint == torch.bfloat16 and has_native_bf16() else torch.float32

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Every dtype runs, some slowly."""

    def peak_memory_bytes(self, work: Callable[[], None]) -> int:
        """0, and the work is not run: the pool's share leaves room for any step."""
        return 0

    def reserve_memory(self, size_bytes: int) -> None:
        """See Device."""

    def kv_pool_bytes(self, *, utilization: float, peak_bytes: int, useful_bytes: int) -> int:
        """The smallest of: useful_bytes, a quarter of the memory that is free beside peak_bytes, 4 GiB. `utilization`
        is for GPUs.
        """
        free = max(self.free_memory_bytes() - peak_bytes, 0)
        return min(useful_bytes, int(free * _KV_SHARE), _KV_CAP_BYTES)
