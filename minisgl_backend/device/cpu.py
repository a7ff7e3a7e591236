"""The CPU as a device: cores and memory this process may really use, containers included."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import torch

_GIB = 1 << 30
_KV_SHARE = 0.25  # of the memory still free: the rest is for the page cache of mapped weights, and for Triton
_KV_CAP_BYTES = 4 * _GIB


class CpuDevice:
    """Sets torch's thread count of this process when opened: one device per process."""

    def __init__(self, threads: int = 0) -> None:
        torch.set_num_threads(threads or usable_cores())

    @property
    def name(self) -> str:
        capability = torch.backends.cpu.get_cpu_capability()
        return f"cpu ({capability}, {torch.get_num_threads()} threads)"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def free_memory_bytes(self) -> int:
        return min(_meminfo_bytes("MemAvailable"), _cgroup_free_bytes())

    def total_memory_bytes(self) -> int:
        return min(_meminfo_bytes("MemTotal"), _cgroup_limit_bytes())

    def synchronize(self) -> None:
        """CPU work is done when its call returns."""

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

    def kv_pool_bytes(self, *, utilization: float, peak_bytes: int, useful_bytes: int) -> int:
        """The smallest of: useful_bytes, a quarter of the free memory, 4 GiB. `utilization` is for GPUs."""
        return min(useful_bytes, int(self.free_memory_bytes() * _KV_SHARE), _KV_CAP_BYTES)


def has_native_bf16() -> bool:
    """Whether the processor multiplies bf16 itself (AVX512_BF16, AMX, or Arm's BF16 extension)."""
    flags = _cpu_flags(Path("/proc/cpuinfo"))
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def usable_cores() -> int:
    """Cores of this process's affinity mask, no more than the container's CPU quota rounded up."""
    cores = len(os.sched_getaffinity(0))
    quota = _read(Path("/sys/fs/cgroup/cpu.max")).split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, math.ceil(int(quota[0]) / int(quota[1])))
    return max(cores, 1)


def _cpu_flags(cpuinfo: Path) -> frozenset[str]:
    for line in _read(cpuinfo).splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _meminfo_bytes(field: str) -> int:
    for line in _read(Path("/proc/meminfo")).splitlines():
        key, _, value = line.partition(":")
        if key == field:
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_limit_bytes() -> int:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _read(Path(path)).strip()
        if text.isdigit():
            return int(text)
    return 1 << 62


def _cgroup_free_bytes() -> int:
    """The limit less what is held; file pages that can be dropped (the mapped weights) do not count as held."""
    limit = _cgroup_limit_bytes()
    for usage, stat, key in (
        ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat", "inactive_file"),
        ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "/sys/fs/cgroup/memory/memory.stat", "total_inactive_file"),
    ):
        held = _read(Path(usage)).strip()
        if held.isdigit():
            stats = dict(line.split(" ", 1) for line in _read(Path(stat)).splitlines() if " " in line)
            return max(limit - int(held) + int(stats.get(key, 0)), 0)
    return limit


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
