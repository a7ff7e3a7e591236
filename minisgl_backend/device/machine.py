"""Cores and memory this process may really use, containers included. Loads no torch: `minisgl doctor` tells them."""

from __future__ import annotations

import math
import os
from pathlib import Path


def free_memory_bytes() -> int:
    """Main memory a new process could use."""
    return min(_meminfo_bytes("MemAvailable"), _cgroup_free_bytes())


def total_memory_bytes() -> int:
    """Main memory of the machine, or of the container."""
    return min(_meminfo_bytes("MemTotal"), _cgroup_limit_bytes())


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
