"""Threads and cores of the workers, decided on machines described here."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.config import parse_cpu_cores, parse_setting, resolve_config
from minisgl_backend.device.machine import quota_cores, read_machine
from minisgl_backend.device.placement import Cpu, Machine, WorkerPlace, cpu_list, place
from minisgl_backend.errors import ConfigError


def machine(cores: int, *, smt: int = 1, nodes: int = 1, quota: float = math.inf) -> Machine:
    """As Linux numbers them: first one hyperthread of every core, then the others. A package is a node."""
    per_node = cores // nodes
    cpus = (
        Cpu(thread * cores + core, core // per_node, core % per_node, core // per_node)
        for thread in range(smt)
        for core in range(cores)
    )
    return Machine(tuple(cpus), quota)


LARGE = machine(64, smt=2, nodes=2)


@pytest.mark.parametrize(
    ("described", "threads", "spin_rounds"),
    [
        (machine(1), 1, 0),
        (machine(1, smt=2), 1, 0),
        (machine(2), 1, 0),
        (machine(2, smt=2), 1, 0),
        (machine(4), 3, 1000),
        (machine(4, smt=2), 3, 1000),
        (machine(8), 7, 1000),
        (machine(8, smt=2), 7, 1000),
        (machine(16), 15, 1000),
        (LARGE, 62, 1000),
        (machine(2, quota=1.5), 1, 0),
        (machine(64, quota=0.5), 1, 0),
        (machine(64, quota=2.0), 1, 0),
        (machine(64, quota=4.0), 3, 0),
        (machine(64, quota=16.0), 15, 0),
        (machine(8, quota=64.0), 7, 0),
    ],
    ids=lambda value: f"{len(value.cpus)} CPUs, quota {value.quota_cores}" if isinstance(value, Machine) else None,
)
def test_a_worker_has_a_thread_for_each_core_it_may_use_less_what_is_left_to_the_others(
    described: Machine, threads: int, spin_rounds: int
) -> None:
    assert place(described).workers == (WorkerPlace(threads, (), spin_rounds),)


def test_only_the_cores_of_the_affinity_mask_count() -> None:
    masked = Machine(tuple(cpu for cpu in LARGE.cpus if cpu.id in (3, 67, 4, 70)), math.inf)
    assert place(masked).workers == (WorkerPlace(2, (), 1000),), "3 and 67 are one core"


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 100])
def test_several_ranks_share_the_cores_and_none_is_left_without_a_thread(ranks: int) -> None:
    workers = place(LARGE, ranks=ranks).workers
    assert len(workers) == ranks and len(set(workers)) == 1
    assert sum(worker.threads for worker in workers) <= max(62, ranks)
    assert workers[0].threads == max(62 // ranks, 1)


def test_the_setting_threads_wins_and_more_than_there_are_cores_sleep_at_once() -> None:
    assert place(LARGE, threads=8).workers == (WorkerPlace(8, (), 1000),)
    assert place(LARGE, threads=64).workers == (WorkerPlace(64, (), 0),)
    assert place(machine(2), threads=7).workers == (WorkerPlace(7, (), 0),)


def test_named_cpus_are_what_the_worker_is_pinned_to_with_a_thread_for_each_core() -> None:
    assert place(LARGE, cpu_cores="0-3,64-67").workers == (WorkerPlace(4, (0, 1, 2, 3, 64, 65, 66, 67), 0),)
    assert place(LARGE, cpu_cores="5", threads=2).workers == (WorkerPlace(2, (5,), 0),)
    assert place(machine(8, quota=2.5), cpu_cores="0-3").workers == (WorkerPlace(2, (0, 1, 2, 3), 0),)


def test_ranks_that_are_pinned_get_whole_cores_of_one_node_and_no_cpu_twice() -> None:
    workers = place(LARGE, cpu_cores="0-127", ranks=4).workers
    node_of = {cpu.id: cpu.node for cpu in LARGE.cpus}
    assert sorted(id for worker in workers for id in worker.cpus) == list(range(128))
    for worker in workers:
        assert worker.threads == 16
        assert len({node_of[id] for id in worker.cpus}) == 1
        assert {id % 64 for id in worker.cpus} == {id for id in worker.cpus if id < 64}, "both hyperthreads of a core"


def test_more_pinned_ranks_than_cores_are_refused() -> None:
    with pytest.raises(ConfigError, match="'cpu_cores' names 1 cores for 2 workers"):
        place(LARGE, cpu_cores="0,64", ranks=2)


@pytest.mark.parametrize("text", ["auto", "0-", "-1", "3-1", "0;1", "0,,1", ",", "8192", "0-99999", "٣"])
def test_what_is_no_list_of_cpus_is_refused_by_the_name_of_the_setting_with_the_range(text: str) -> None:
    with pytest.raises(ConfigError, match=r"'cpu_cores' must be empty or a list of CPUs from 0 to 8191 .*got"):
        resolve_config({"cpu_cores": text})


def test_a_single_cpu_is_named_on_the_command_line_as_a_number() -> None:
    given = dict(parse_setting(text) for text in ("cpu_cores=3", "threads=3"))
    assert given == {"cpu_cores": "3", "threads": 3}
    assert resolve_config(given).cpu_cores == "3"
    assert parse_setting('cpu_cores="0-3"') == ("cpu_cores", "0-3")
    with pytest.raises(ConfigError, match="cpu_cores"):
        resolve_config(dict([parse_setting("cpu_cores=true")]))


def test_cpus_that_are_not_ours_are_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match="'cpu_cores' names 2-3, but this process may use 0-1"):
        place(machine(2), cpu_cores="0-3")


def test_pinning_is_refused_where_there_is_no_process_to_pin() -> None:
    with pytest.raises(ConfigError, match="'cpu_cores' needs 'executor' to be \"process\", it is 'inline'"):
        resolve_config({"cpu_cores": "0", "executor": "inline"})


def test_a_limit_of_steps_is_refused_where_there_is_no_process_to_end() -> None:
    with pytest.raises(ConfigError, match="'step_limit_s' needs 'executor' to be \"process\", it is 'inline'"):
        resolve_config({"step_limit_s": 10, "executor": "inline"})
    for taken in ({"step_limit_s": 0}, {}):
        assert resolve_config({"executor": "inline", **taken}).executor == "inline"
    assert resolve_config({"step_limit_s": 10}).step_limit_s == 10.0


def test_lists_of_cpus_are_written_as_linux_does() -> None:
    assert parse_cpu_cores(" 8, 0-3 ,2") == (0, 1, 2, 3, 8)
    assert parse_cpu_cores("") == ()
    assert cpu_list((0, 1, 2, 3, 8, 10, 11)) == "0-3,8,10-11"
    assert cpu_list(()) == ""


@pytest.mark.parametrize(
    ("described", "settings", "line"),
    [
        (machine(1), {}, "worker-0: 1 thread on any of 1 core"),
        (machine(2), {}, "worker-0: 1 thread on any of 2 cores"),
        (machine(2), {"threads": 2}, "worker-0: 2 threads on any of 2 cores, sleeping while they wait"),
        (machine(8), {}, "worker-0: 7 threads on any of 8 cores, looking for one another a moment before they sleep"),
        (machine(2, quota=1.5), {}, "worker-0: 1 thread on any of 2 cores with a quota of 1.5"),
        (machine(8), {"inline": True}, "worker-0: 7 threads on any of 8 cores, in the host's process"),
        (LARGE, {"cpu_cores": "0-3,8"}, "worker-0: 5 threads pinned to CPUs 0-3,8, sleeping while they wait"),
    ],
)
def test_what_was_decided_is_told_in_a_line(described: Machine, settings: dict[str, Any], line: str) -> None:
    assert place(described, **settings).lines == (line,)


def test_a_worker_adds_to_its_environment_and_overrides_nothing() -> None:
    sleeping, spinning = WorkerPlace(2, (), 0), WorkerPlace(7, (), 1000)
    assert sleeping.environment({"PATH": "x"}) == {
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": "2",
        "OPENBLAS_NUM_THREADS": "1",
    }
    assert spinning.environment({})["GOMP_SPINCOUNT"] == "1000"
    for given in ({"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "5"}):
        assert spinning.environment(given) == {"OMP_NUM_THREADS": "7", "OPENBLAS_NUM_THREADS": "1"}
    assert "OMP_NUM_THREADS" not in sleeping.environment({"OMP_NUM_THREADS": "1"})


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_cores_and_nodes_are_read_from_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 3})
    cpus = written(
        tmp_path / "cpu",
        {
            f"cpu{id}/topology/{name}": f"{value}\n"
            for id in range(4)
            for name, value in (("physical_package_id", id // 2), ("core_id", 7))
        },
    )
    nodes = written(tmp_path / "node", {"node0/cpulist": "0-1\n", "node1/cpulist": "2,3\n", "possible": "0-1\n"})
    assert read_machine(cpus, nodes).cpus == (Cpu(0, 0, 7, 0), Cpu(2, 1, 7, 1), Cpu(3, 1, 7, 1))


def test_where_the_kernel_does_not_tell_each_cpu_is_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5})
    assert read_machine(tmp_path, tmp_path).cpus == (Cpu(1, 0, 1, 0), Cpu(5, 0, 5, 0))


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, math.inf),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        ({}, math.inf),
    ],
)
def test_the_quota_of_the_container_is_read_in_both_forms(tmp_path: Path, files: dict[str, str], quota: float) -> None:
    assert quota_cores(written(tmp_path, files)) == quota


def test_this_machine_is_placed() -> None:
    (worker,) = place(read_machine()).workers
    assert 1 <= worker.threads <= len(os.sched_getaffinity(0)) and worker.cpus == ()
