"""Cores and memory this process may really use, containers included. Loads no torch: `minisgl doctor` tells them."""

from __future__ import annotations

import math
import os
from pathlib import Path

from minisgl_backend.config import parse_cpu_cores
from minisgl_backend.device.placement import Cpu, Machine, place

_CPUS = Path("/sys/devices/system/cpu")
_NODES = Path("/sys/devices/system/node")
_CGROUPS = Path("/sys/fs/cgroup")


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
    """CPUs of this process's affinity mask, no more than the container's CPU quota rounded up."""
    cores, quota = len(os.sched_getaffinity(0)), quota_cores()
    return max(min(cores, math.ceil(quota)) if math.isfinite(quota) else cores, 1)


def read_machine(cpus: Path = _CPUS, nodes: Path = _NODES) -> Machine:
    """The CPUs this process may use, with their cores and NUMA nodes, and the container's quota.

    Where the kernel does not tell (a sandbox without /sys), each CPU counts as a core of its own, all in one node.
    """
    node_of = {
        id: int(folder.name.removeprefix("node"))
        for folder in nodes.glob("node[0-9]*")
        for id in parse_cpu_cores(_read(folder / "cpulist").strip())
    }
    found = []
    for id in sorted(os.sched_getaffinity(0)):
        topology = cpus / f"cpu{id}" / "topology"
        package, core = (_number(topology / name) for name in ("physical_package_id", "core_id"))
        found.append(Cpu(id, package or 0, id if core is None else core, node_of.get(id, 0)))
    return Machine(tuple(found), quota_cores())


def default_threads() -> int:
    """Of the math library, in a process that computes alone for its engine."""
    return place(read_machine()).workers[0].threads


def quota_cores(groups: Path = _CGROUPS) -> float:
    """CPU time per time that the container may take (cgroup v2, else v1); infinity without a limit."""
    quota, _, period = _read(groups / "cpu.max").strip().partition(" ")
    if not quota:
        quota, period = (_read(groups / "cpu" / f"cpu.cfs_{word}_us").strip() for word in ("quota", "period"))
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else math.inf


def _number(file: Path) -> int | None:
    text = _read(file).strip()
    return int(text) if text.isdigit() else None


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
