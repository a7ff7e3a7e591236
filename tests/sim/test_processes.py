"""The real processes (host, scheduler, worker) on the fake device, through the link that Triton's stub uses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import psutil
import pytest
from msgspec import structs

from load.serving import engine_processes, is_alive
from minisgl_backend.actors.connection import inspect, retire
from minisgl_backend.actors.launch import absolute, find
from minisgl_backend.actors.link import EngineLink
from minisgl_backend.actors.rundir import RUNTIME_VARIABLE, engine_dir
from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import ConfigError, EngineUnavailable, ModelNotFound, StartError, Status
from minisgl_backend.messages.client import Answered, EngineState, Failed, Finished, Health, Output, Request, Stats
from minisgl_backend.messages.ids import RequestId

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0
LONG = 900  # tokens, 18 s of `slow`
BOTH_DEPTHS = pytest.mark.parametrize("overlap", [False, True], ids=["depth-0", "overlap"])


class Client:
    """A link with a memory."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        self.healths: queue.SimpleQueue[Health] = queue.SimpleQueue()
        self.lines: list[str] = []
        self._ids = count(1)
        self.link = EngineLink.open(config, self._keep, self.healths.put, self.lines.append)

    def _keep(self, outputs: tuple[Output, ...]) -> None:
        for output in outputs:
            self.outputs.put(output)

    def submit(self, text: str, *, max_tokens: int = 8) -> RequestId:
        id = RequestId(next(self._ids))
        self.link.submit(Request(id, text.encode(), b'{"max_tokens": %d}' % max_tokens, True, None))
        return id

    def terminal(self) -> Finished | Failed:
        while True:
            output = self.outputs.get(timeout=PATIENCE_S)
            if isinstance(output, Finished | Failed):
                return output

    def until(self, state: EngineState) -> None:
        while self.healths.get(timeout=PATIENCE_S).state is not state:
            pass


@pytest.fixture
def overlap() -> bool:
    """As users have it unless a test asks for both: most of these are about processes and not about steps."""
    return EngineConfig().overlap


@pytest.fixture
def config(tiny_llama: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineConfig]:
    """Settings of an engine nobody else meets; whatever is left of it at the end is a failure."""
    runtime = Path(f"/tmp/minisgl-test-{os.getpid()}")
    monkeypatch.setenv(RUNTIME_VARIABLE, str(runtime))
    yield EngineConfig(model=str(tiny_llama), device="fake", lease_s=0.5, fake_step_ms=2.0, overlap=overlap)
    _eventually(lambda: not engine_processes(runtime), "processes of the engine are left")
    shutil.rmtree(runtime)


@pytest.fixture
def slow(config: EngineConfig) -> EngineConfig:
    """Its long answers have not ended by themselves when something is done to them."""
    return structs.replace(config, fake_step_ms=20.0)


def _eventually(condition: object, failure: str) -> None:
    assert callable(condition)
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, failure
        time.sleep(0.02)  # waiting for the kernel, not for our code


def _stats(config: EngineConfig) -> Stats:
    stats = asyncio.run(inspect(engine_dir(absolute(config))))
    assert stats is not None
    return stats


def _retired(config: EngineConfig) -> None:
    """Long before its lease is over; the host may not have noticed yet that its last holder is gone."""
    _eventually(lambda: asyncio.run(retire(engine_dir(absolute(config)))), "somebody holds the engine")


def _pid(stats: Stats, role: str) -> int:
    return dict(stats.pids)[role]


@BOTH_DEPTHS
def test_requests_go_through_and_the_engine_stops_when_its_lease_is_given_back(config: EngineConfig) -> None:
    client = Client(config)
    for _ in range(20):
        client.submit("the cat")
    ends = [client.terminal() for _ in range(20)]
    assert all(isinstance(end, Finished) and end.num_output_tokens == 8 for end in ends)
    _eventually(lambda: _stats(config).free_pages == _stats(config).total_pages, "pages are lost")
    client.link.close()
    _eventually(lambda: find(engine_dir(absolute(config))) is None, "the engine outlives its lease")


@pytest.mark.parametrize("given", [None, "ACTIVE"])
def test_threads_of_a_worker_sleep_while_they_wait_unless_the_user_says_otherwise(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    """Spinning ones, on cores that others use too, make a step take twenty times as long."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    client = Client(config)
    worker = psutil.Process(_pid(_stats(config), "worker-0"))
    assert worker.environ()["OMP_WAIT_POLICY"] == (given or "PASSIVE")
    client.link.close()


def test_the_worker_alone_is_pinned_to_the_cpus_of_the_setting_and_the_operator_is_told(config: EngineConfig) -> None:
    everywhere = os.sched_getaffinity(0)
    one = max(everywhere)
    client = Client(structs.replace(config, cpu_cores=str(one), threads=1))
    stats = _stats(client.config)
    assert os.sched_getaffinity(_pid(stats, "worker-0")) == {one}
    assert os.sched_getaffinity(_pid(stats, "scheduler")) == everywhere
    assert psutil.Process(_pid(stats, "worker-0")).environ()["OMP_NUM_THREADS"] == "1"
    told = f"worker-0: 1 thread pinned to CPUs {one}"
    assert any(told in line for line in client.lines)
    latecomer = Client(client.config)
    assert any(told in line for line in latecomer.lines), "who meets a running engine is told too"
    latecomer.link.close()
    client.link.close()
    _eventually(lambda: find(engine_dir(absolute(client.config))) is None, "the engine outlives its lease")


def test_a_cpu_that_is_not_there_is_refused_at_the_start_by_the_name_of_the_setting(config: EngineConfig) -> None:
    with pytest.raises(StartError, match="'cpu_cores' names 8191, but this process may use") as caught:
        Client(structs.replace(config, cpu_cores="8191"))
    assert caught.value.exit_code == ConfigError.exit_code


@pytest.mark.parametrize(
    ("overlap", "number"),
    [(False, signal.SIGKILL), (True, signal.SIGKILL), (True, signal.SIGSTOP)],
    ids=["killed at depth 0", "killed", "stopped"],
)
@pytest.mark.parametrize("role", ["scheduler", "worker-0"])
def test_a_part_that_is_killed_or_stopped_is_answered_within_two_seconds_and_comes_back(
    slow: EngineConfig, role: str, number: signal.Signals
) -> None:
    """Two, where there is time; in any case long before the answers would have ended."""
    client = Client(slow)
    ids = {client.submit("the cat", max_tokens=LONG) for _ in range(10)}
    client.outputs.get(timeout=PATIENCE_S)
    os.kill(_pid(_stats(slow), role), number)
    killed = time.monotonic()
    ends = [client.terminal() for _ in ids]
    assert time.monotonic() - killed < 10.0
    assert {end.id for end in ends} == ids
    assert all(isinstance(end, Failed) and end.status is Status.UNAVAILABLE for end in ends)
    client.until(EngineState.RESTARTING)
    client.until(EngineState.READY)
    client.submit("the cat")
    assert isinstance(client.terminal(), Finished)
    assert _stats(slow).restarts == 1
    client.link.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_that_is_lost_takes_its_group_along_and_all_come_back(
    slow: EngineConfig, number: signal.Signals
) -> None:
    client = Client(structs.replace(slow, tensor_parallel=2))
    ids = {client.submit("the cat", max_tokens=LONG) for _ in range(4)}
    client.outputs.get(timeout=PATIENCE_S)
    before, place = _stats(client.config), find(engine_dir(absolute(client.config)))
    assert [role for role, _ in before.pids] == ["scheduler", "worker-0", "worker-1"]
    assert [_ranks_memories(pid) for _, pid in before.pids] == [0, 1, 1]
    os.kill(_pid(before, "worker-1"), number)
    ends = [client.terminal() for _ in ids]
    assert all(isinstance(end, Failed) and end.status is Status.UNAVAILABLE for end in ends)
    client.until(EngineState.RESTARTING)
    client.until(EngineState.READY)
    client.submit("the cat")
    assert isinstance(client.terminal(), Finished)
    assert not any(psutil.pid_exists(pid) for _, pid in before.pids)
    assert place is not None and _ranks_memories(place.pid) == 1, "that of the group that died is gone"
    client.link.close()


def _ranks_memories(pid: int) -> int:
    """Descriptors that it has of memory which ranks share."""
    found = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found += "memfd:minisgl-ranks" in str(descriptor.readlink())
    return found


def test_heads_that_can_not_be_dealt_out_end_the_start_with_the_degrees_that_work(config: EngineConfig) -> None:
    with pytest.raises(StartError, match=r"'tensor_parallel' is 3, but 4 query heads .* takes 1, 2, 4") as caught:
        Client(structs.replace(config, tensor_parallel=3))
    assert caught.value.exit_code == ConfigError.exit_code


def test_a_step_that_hangs_is_answered_written_down_and_the_engine_starts_again(config: EngineConfig) -> None:
    client = Client(structs.replace(config, fake_step_ms=60_000.0, step_limit_s=0.5))
    before = _stats(client.config)
    client.submit("the cat and the hat")
    end = client.terminal()
    assert isinstance(end, Failed) and end.status is Status.UNAVAILABLE
    client.until(EngineState.RESTARTING)
    client.until(EngineState.READY)
    assert not {pid for _, pid in before.pids} & {pid for _, pid in _stats(client.config).pids}
    report = (engine_dir(absolute(client.config)) / "hang-g1.txt").read_text()
    assert "step 1 has taken" in report and "'step_limit_s'" in report
    assert re.search(r"step 1: 1 rows .* 0:0\+\d+s; 1 pages granted; admitted", report)
    assert re.search(r"── worker-0 .*\n(.*\n)*.*worker/fake.py.* in run", report), "where the worker hangs"
    assert "── scheduler" in report and "it did not answer" not in report
    assert "the cat" not in report
    client.link.close()


def test_a_host_tells_the_view_of_an_engine_that_died(slow: EngineConfig) -> None:
    client = Client(structs.replace(slow, max_restarts=0))
    os.kill(_pid(_stats(client.config), "scheduler"), signal.SIGKILL)
    client.until(EngineState.FAILED)
    id = RequestId(10**6)
    client.link.submit(Request(id, None, b"", False, None, operation=b"engine"))
    told = client.outputs.get(timeout=PATIENCE_S)
    assert isinstance(told, Answered) and told.id == id
    view = json.loads(told.result)
    assert view["state"] == "failed" and view["running"] == [] and view["slots"]["total"] == 0
    client.link.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_host_that_is_killed_or_stopped_is_answered_at_once_and_started_again(
    slow: EngineConfig, number: signal.Signals
) -> None:
    client = Client(slow)
    client.submit("the cat", max_tokens=LONG)
    client.outputs.get(timeout=PATIENCE_S)
    place = find(engine_dir(absolute(slow)))
    assert place is not None
    children = psutil.Process(place.pid).children()
    os.kill(place.pid, number)
    end = client.terminal()
    assert isinstance(end, Failed) and end.status is Status.UNAVAILABLE
    client.until(EngineState.RESTARTING)
    client.until(EngineState.READY)
    client.submit("the cat")
    assert isinstance(client.terminal(), Finished)
    _eventually(lambda: not any(map(is_alive, children)), "orphans of the killed host")
    client.link.close()


_HOLDER = """
import sys, msgspec
from minisgl_backend.actors.link import EngineLink
from minisgl_backend.config import EngineConfig
config = msgspec.json.decode(sys.argv[1], type=EngineConfig)
link = EngineLink.open(config, lambda outputs: None, lambda health: None, lambda line: None)
print("held", flush=True)
input()
"""


def _holder(config: EngineConfig) -> subprocess.Popen[bytes]:
    import msgspec

    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, msgspec.json.encode(config).decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    return holder


def test_the_engine_of_a_killed_holder_stops_when_its_lease_has_run_out(config: EngineConfig) -> None:
    holder = _holder(config)
    holder.kill()
    holder.communicate()
    _eventually(lambda: find(engine_dir(absolute(config))) is None, "the engine outlives its killed holder")


def test_a_second_holder_that_comes_in_time_meets_the_warm_engine(config: EngineConfig) -> None:
    patient = EngineConfig(model=config.model, device="fake", lease_s=300.0)
    first = _holder(patient)
    warm = find(engine_dir(absolute(patient)))
    first.kill()
    first.communicate()
    second = Client(patient)
    again = find(engine_dir(absolute(patient)))
    assert warm is not None and again is not None and again.pid == warm.pid
    second.submit("the cat")
    assert isinstance(second.terminal(), Finished)
    second.link.close()
    _retired(patient)


def test_two_holders_share_one_engine_and_each_gets_only_its_own_answers(config: EngineConfig) -> None:
    clients = [Client(config), Client(config)]
    place = find(engine_dir(absolute(config)))
    for client, tokens in zip(clients, (3, 5), strict=True):
        for _ in range(10):
            client.submit("the cat", max_tokens=tokens)
    for client, tokens in zip(clients, (3, 5), strict=True):
        ends = [client.terminal() for _ in range(10)]
        assert all(isinstance(end, Finished) and end.num_output_tokens == tokens for end in ends)
    clients[0].link.close()
    clients[1].submit("the cat")
    assert isinstance(clients[1].terminal(), Finished)
    assert find(engine_dir(absolute(config))) is not None and place is not None
    clients[1].link.close()


def test_retire_leaves_an_engine_in_use_alone(config: EngineConfig) -> None:
    client = Client(EngineConfig(model=config.model, device="fake", lease_s=300.0))
    assert not asyncio.run(retire(engine_dir(absolute(client.config))))
    client.submit("the cat")
    assert isinstance(client.terminal(), Finished)
    client.link.close()
    _retired(client.config)


def test_a_host_that_dies_at_every_start_is_given_up_with_its_log_named(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log file is a folder: no host can start, neither now nor ever."""
    run_dir = engine_dir(absolute(config))
    (run_dir / "engine.log" / "in the way").mkdir(parents=True)
    (run_dir / "engine.log.1" / "too").mkdir(parents=True)
    with pytest.raises(StartError, match="engine"):
        Client(config)


def test_trouble_after_a_good_start_is_told_and_tried_again(config: EngineConfig) -> None:
    client = Client(config)
    run_dir = engine_dir(absolute(config))
    place = find(run_dir)
    assert place is not None
    (run_dir / "engine.log").unlink()
    (run_dir / "engine.log" / "in the way").mkdir(parents=True)  # the next host can not start …
    (run_dir / "engine.log.1" / "too").mkdir(parents=True)
    os.kill(place.pid, signal.SIGKILL)
    client.until(EngineState.RESTARTING)
    client.submit("the cat")
    end = client.terminal()
    assert isinstance(end, Failed) and end.status is Status.UNAVAILABLE
    shutil.rmtree(run_dir / "engine.log")  # … until somebody mends it
    client.until(EngineState.READY)
    client.submit("the cat")
    assert isinstance(client.terminal(), Finished)
    client.link.close()


def test_other_devices_and_other_caches_are_other_engines(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = engine_dir(config)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    there = engine_dir(config)
    assert there != here
    monkeypatch.setenv("MINISGL_CACHE", "/elsewhere")
    assert engine_dir(config) not in (here, there)


def test_a_folder_named_like_a_fetched_model_is_not_in_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert absolute(EngineConfig(model="smollm2")).model == "smollm2"


def test_a_step_trace_is_written_where_its_holder_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute(EngineConfig(step_trace="here.json")).step_trace == str(tmp_path / "here.json")
    assert absolute(EngineConfig()).step_trace == ""


def test_what_is_open_when_the_link_closes_is_answered_once(slow: EngineConfig) -> None:
    client = Client(slow)
    ids = {client.submit("the cat", max_tokens=LONG) for _ in range(5)}
    client.outputs.get(timeout=PATIENCE_S)
    client.link.close()
    ends = [client.terminal() for _ in ids]
    assert {end.id for end in ends} == ids
    assert all(isinstance(end, Failed) and end.status is Status.CANCELLED for end in ends)
    with pytest.raises(EngineUnavailable):
        client.link.submit(Request(RequestId(99), b"x", b"", True, None))
    client.link.cancel(RequestId(99))  # too late, and harmless
    client.link.close()


def test_a_model_that_is_not_there_is_one_sentence_with_its_exit_code(config: EngineConfig, tmp_path: Path) -> None:
    with pytest.raises(StartError) as caught:
        Client(EngineConfig(model=str(tmp_path / "nowhere"), device="fake", lease_s=0.5))
    assert caught.value.exit_code == ModelNotFound.exit_code
    assert "nowhere" in str(caught.value) and "\n" not in str(caught.value)


def test_a_failed_start_is_not_remembered(config: EngineConfig, tmp_path: Path, tiny_llama: Path) -> None:
    model = tmp_path / "late"
    settings = EngineConfig(model=str(model), device="fake", lease_s=300.0)
    with pytest.raises(StartError):
        Client(settings)
    model.symlink_to(tiny_llama)
    client = Client(settings)
    client.submit("the cat")
    assert isinstance(client.terminal(), Finished)
    client.link.close()
    _retired(settings)


def test_starts_at_the_same_moment_agree_on_one_host(config: EngineConfig) -> None:
    import threading

    clients: list[Client] = []
    threads = [threading.Thread(target=lambda: clients.append(Client(config))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(clients) == 4
    for client in clients:
        client.submit("the cat")
    for client in clients:
        assert isinstance(client.terminal(), Finished)
        client.link.close()
