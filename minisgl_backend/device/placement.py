"""How many threads each worker computes with, on which cores, and how they wait for one another: decided from the
machine and the settings, and nowhere else.

    device/machine.py ── Machine ────►  place (here)  ── Placement ──►  environment and affinity of each worker
    settings `threads`, `cpu_cores` ─►                                  a line for each, for the operator

Only workers compute with several threads. A step is as slow as its slowest thread, so one core is left to those who
would take it away from time to time: host, scheduler, Triton, and whatever else runs. Why, and what it is worth, is in
docs/performance.md, "Threads and cores".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from minisgl_backend.config import parse_cpu_cores
from minisgl_backend.errors import ConfigError

_SPARE_FROM = ((32, 2), (2, 1))  # physical cores a machine has from so many on → left to everybody else
_SPIN_ROUNDS = 1000  # of libgomp's wait: 10 to 40 µs, about what it costs to wake a thread


@dataclass(frozen=True, slots=True)
class Cpu:
    """One CPU as Linux counts them: a hyperthread where cores have several."""

    id: int
    package: int
    core: int  # within its package; hyperthreads of one core have the same
    node: int  # of NUMA


@dataclass(frozen=True, slots=True)
class Machine:
    """What an engine may use of it."""

    cpus: tuple[Cpu, ...]  # of the affinity mask, by id
    quota_cores: float  # the container's CPU time per time; infinity where nothing limits it


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Of one rank."""

    threads: int  # of the math library
    cpus: tuple[int, ...]  # it is pinned to these; empty: the kernel chooses
    spin_rounds: int  # how long a thread looks for the others before it sleeps; 0: it sleeps at once

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """What to add to the rank's environment before it loads the math library. What is there stays as it is.

        numpy only counts rows in a worker: it gets one thread.
        """
        own = {"OMP_NUM_THREADS": str(self.threads), "OPENBLAS_NUM_THREADS": "1"}
        if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & given.keys():
            own["OMP_WAIT_POLICY"] = "PASSIVE"
            if self.spin_rounds:
                own["GOMP_SPINCOUNT"] = str(self.spin_rounds)
        return {name: value for name, value in own.items() if name not in given}


@dataclass(frozen=True, slots=True)
class Placement:
    """Of one engine group."""

    workers: tuple[WorkerPlace, ...]  # by rank
    lines: tuple[str, ...]  # what was decided, for the operator


def place(
    machine: Machine, *, threads: int = 0, cpu_cores: str = "", ranks: int = 1, inline: bool = False
) -> Placement:
    """threads, cpu_cores: the settings. ranks: workers on this machine. inline: they run in the host's process, whose
    environment, and so how threads wait, is not ours to choose.

    By default nobody is pinned: the kernel knows who else computes here (a second engine, other models of Triton), we
    do not. Hyperthreads of one core share what a matrix product needs, so they count as one. A quota is kept to: more
    threads than it has would all be stopped together for the rest of each period.

    Raises ConfigError: `cpu_cores` names what is not there or is too little for the ranks.
    """
    chosen = parse_cpu_cores(cpu_cores)
    if chosen:
        shares = _split(_named(machine, chosen), ranks)
        workers = [_pinned(share, machine.quota_cores / ranks, threads) for share in shares]
    else:
        workers = [_free(machine, ranks, threads)] * ranks
    how = "in the host's process" if inline else ""
    lines = (f"worker-{rank}: {_describe(worker, machine, how)}" for rank, worker in enumerate(workers))
    return Placement(tuple(workers), tuple(lines))


def _free(machine: Machine, ranks: int, threads: int) -> WorkerPlace:
    """One of `ranks` alike. Its threads look for one another only where each has a core, and no quota pays for it."""
    cores, limited = _cores(machine.cpus), math.isfinite(machine.quota_cores)
    usable = min(cores, int(machine.quota_cores)) if limited else cores
    spare = next((spare for least, spare in _SPARE_FROM if usable >= least), 0)
    count = threads or max((usable - spare) // ranks, 1)
    spins = count > 1 and spare > 0 and not limited and count * ranks + spare <= cores
    return WorkerPlace(count, (), _SPIN_ROUNDS if spins else 0)


def _pinned(cpus: Sequence[Cpu], quota_cores: float, threads: int) -> WorkerPlace:
    """On all of these, which somebody has set apart. It sleeps at once all the same: they may be set apart for two."""
    count = threads or max(int(min(_cores(cpus), quota_cores)), 1)
    return WorkerPlace(count, tuple(cpu.id for cpu in cpus), 0)


def cpu_list(ids: Sequence[int]) -> str:
    """Ascending CPUs as Linux writes them: 0, 1, 2, 8 → "0-2,8"."""
    parts: list[str] = []
    for at, id in enumerate(ids):
        if at and ids[at - 1] == id - 1:
            parts[-1] = f"{parts[-1].split('-')[0]}-{id}"
        else:
            parts.append(str(id))
    return ",".join(parts)


def _named(machine: Machine, chosen: Sequence[int]) -> tuple[Cpu, ...]:
    usable = {cpu.id: cpu for cpu in machine.cpus}
    if missing := [id for id in chosen if id not in usable]:
        raise ConfigError(
            f"setting 'cpu_cores' names {cpu_list(missing)}, but this process may use {cpu_list(sorted(usable))}"
        )
    return tuple(usable[id] for id in chosen)


def _split(cpus: Sequence[Cpu], ranks: int) -> list[tuple[Cpu, ...]]:
    """Whole cores to each rank, as many to each as can be, neighbours in NUMA together."""
    cores: dict[tuple[int, int, int], list[Cpu]] = {}
    for cpu in cpus:
        cores.setdefault((cpu.node, cpu.package, cpu.core), []).append(cpu)
    if len(cores) < ranks:
        raise ConfigError(f"setting 'cpu_cores' names {len(cores)} cores for {ranks} workers")
    order = [cores[key] for key in sorted(cores)]
    shares = []
    for rank in range(ranks):
        own = order[len(order) * rank // ranks : len(order) * (rank + 1) // ranks]
        shares.append(tuple(sorted((cpu for core in own for cpu in core), key=lambda cpu: cpu.id)))
    return shares


def _cores(cpus: Sequence[Cpu]) -> int:
    """Physical ones."""
    return max(len({(cpu.package, cpu.core) for cpu in cpus}), 1)


def _describe(worker: WorkerPlace, machine: Machine, how: str) -> str:
    """how: told instead of how the threads wait for one another."""
    cores = _count(_cores(machine.cpus), "core")
    where = f"pinned to CPUs {cpu_list(worker.cpus)}" if worker.cpus else f"on any of {cores}"
    if math.isfinite(machine.quota_cores):
        where += f" with a quota of {machine.quota_cores:g}"
    if not how and worker.threads > 1:
        how = "looking for one another a moment before they sleep" if worker.spin_rounds else "sleeping while they wait"
    return f"{_count(worker.threads, 'thread')} {where}" + (f", {how}" if how else "")


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
