"""Processes are killed under load: every client is answered, nothing is left behind, the engine comes back.

On the fake device: the processes, the sockets and Triton are the real ones, only the model is not.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from functools import partial

import grpc
import psutil
import pytest

from load.serving import PATIENCE_S, Server, engine_processes, eventually, is_alive, serving
from load.streams import Answer, ask
from minisgl_backend.actors.launch import find

LONG = {"max_tokens": 8000, "temperature": 0}  # 40 s at least: none has ended when something is killed
TOLD_S = 15.0  # two seconds where there is time; far less than an answer would go on
FAKE = {"device": "fake", "fake_step_ms": 5, "lease_s": 2}


@pytest.fixture(scope="module")
def patient() -> Iterator[Server]:
    """Its engine outlives a server that is started again on a slow machine."""
    with serving("--model", "smollm2", **{**FAKE, "lease_s": 120}) as server:
        yield server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--model", "smollm2", **FAKE) as server:
        yield server


async def _load(server: Server, streams: int) -> list[asyncio.Task[Answer]]:
    """Streams that have begun."""
    tasks = [asyncio.create_task(ask(server.grpc, "the cat", **LONG)) for _ in range(streams)]
    await asyncio.to_thread(
        eventually, lambda: server.stats().running == streams, PATIENCE_S, lambda: str(server.stats())
    )
    return tasks


@pytest.mark.parametrize("role", ["worker-0", "scheduler"])
async def test_a_killed_part_answers_every_stream_at_once_and_the_next_request_is_served(
    server: Server, role: str
) -> None:
    tasks = await _load(server, 16)
    stats = await asyncio.to_thread(server.stats)
    os.kill(dict(stats.pids)[role], signal.SIGKILL)
    answers = await asyncio.wait_for(asyncio.gather(*tasks), TOLD_S)
    assert all(answer.error is not None and "try again" in str(answer.error) for answer in answers)

    async def served() -> bool:
        return (await ask(server.grpc, "the cat", max_tokens=3)).text != ""

    async with asyncio.timeout(PATIENCE_S):
        while not await served():
            pass
    assert (await asyncio.to_thread(server.until_idle)).restarts == stats.restarts + 1


async def test_a_killed_host_is_answered_and_started_again(server: Server) -> None:
    tasks = await _load(server, 8)
    place = find(server.run_dir)
    assert place is not None
    os.kill(place.pid, signal.SIGKILL)
    answers = await asyncio.wait_for(asyncio.gather(*tasks), TOLD_S)
    assert all(answer.error is not None for answer in answers)
    async with asyncio.timeout(PATIENCE_S):
        while (await ask(server.grpc, "the cat", max_tokens=3)).error is not None:
            pass
    await asyncio.to_thread(server.until_idle)


def test_ctrl_c_ends_everything_and_says_goodbye_to_the_engine() -> None:
    with serving("--model", "smollm2", **{**FAKE, "lease_s": 120}) as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        assert engine_processes(server.runtime)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=PATIENCE_S) == 0, "\n".join(server.lines)
        eventually(lambda: not any(map(is_alive, family)), PATIENCE_S, lambda: "a child of the server is left")
        eventually(lambda: not engine_processes(server.runtime), PATIENCE_S, lambda: "the engine waits for its lease")


def test_after_a_kill_of_tritonserver_no_process_outlives_the_lease() -> None:
    with serving("--model", "smollm2", **FAKE) as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        os.kill(server.pid_of("tritonserver"), signal.SIGKILL)
        eventually(lambda: not engine_processes(server.runtime), PATIENCE_S, lambda: "the engine outlives its lease")
        assert server.process.wait(timeout=PATIENCE_S) == 1
        lines = server.lines
        eventually(lambda: any("tritonserver" in line for line in lines[-5:]), PATIENCE_S, lambda: str(lines))
        eventually(lambda: not any(map(is_alive, family)), PATIENCE_S, lambda: "a child of tritonserver is left")


@pytest.mark.parametrize(
    ("victim", "number", "told"),
    [
        ("triton_python_b", signal.SIGKILL, "the stub of model 'minisgl'"),
        ("triton_python_b", signal.SIGSTOP, "the stub of model 'minisgl'"),
        ("tritonserver", signal.SIGSTOP, "tritonserver was stopped"),
    ],
)
async def test_a_lost_stub_breaks_its_connections_and_the_server_comes_back_to_the_warm_engine(
    patient: Server, victim: str, number: signal.Signals, told: str
) -> None:
    """By itself Triton would let them wait for ever, with the model READY."""
    place, before = find(patient.run_dir), len(patient.lines)
    assert place is not None
    tasks = await _load(patient, 8)
    lost = psutil.Process(patient.pid_of(victim))
    lost.send_signal(number)
    broken = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), TOLD_S)
    assert all(isinstance(error, grpc.aio.AioRpcError) for error in broken), broken
    assert any(told in line and "started again" in line for line in patient.lines[before:])
    async with asyncio.timeout(PATIENCE_S):
        while not await _is_served(patient):
            pass
    again = find(patient.run_dir)
    assert again is not None and again.pid == place.pid
    await asyncio.to_thread(patient.until_idle)
    assert not is_alive(lost)
    watched = partial(_is_told, patient, before, "ready again")  # not before, and the next test stops it
    await asyncio.to_thread(eventually, watched, PATIENCE_S, lambda: str(patient.lines[before:]))


def _is_told(server: Server, since: int, words: str) -> bool:
    return any(words in line for line in server.lines[since:])


async def _is_served(server: Server) -> bool:
    try:
        return (await ask(server.grpc, "the cat", max_tokens=3)).text != ""
    except grpc.aio.AioRpcError:  # nobody listens yet
        return False


def test_a_second_server_that_comes_in_time_meets_the_warm_engine() -> None:
    with serving("--model", "smollm2", **{**FAKE, "lease_s": 120}) as first:
        place = find(first.run_dir)
        assert place is not None
        for pid in (first.process.pid, first.pid_of("tritonserver")):  # nobody is left to end the engine in order
            os.kill(pid, signal.SIGKILL)
        first.process.wait(timeout=PATIENCE_S)
        with serving("--model", "smollm2", runtime=first.runtime, **{**FAKE, "lease_s": 120}) as second:
            again = find(second.run_dir)
            assert again is not None and again.pid == place.pid
            assert asyncio.run(ask(second.grpc, "the cat", max_tokens=3)).text
        assert not engine_processes(first.runtime)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--model", "/nowhere/at/all"], 3, "nowhere"),
        (["--set", "pagesize=16"], 2, "did you mean 'page_size'"),
        (["--set", "page_size=0"], 2, "page_size"),
        (["--http-port", "99999"], 2, "http-port"),
    ],
)
def test_what_can_not_start_says_why_in_one_sentence(arguments: list[str], code: int, says: str) -> None:
    import sys
    from pathlib import Path

    minisgl = Path(sys.executable).parent / "minisgl"
    done = subprocess.run([minisgl, "serve", *arguments], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == code, done.stderr
    assert says in done.stderr and "Traceback" not in done.stderr
