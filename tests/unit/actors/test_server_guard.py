"""When a lost stub takes its tritonserver with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from minisgl_backend.actors.internal import HolderId
from minisgl_backend.actors.server_guard import ServerGuard

HOLDER = HolderId(b"holder")
SOON_S = 60.0

PARENT = """
import subprocess, sys
stub = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(stub.pid, flush=True)
input()
"""


@dataclass
class Pair:
    """A process of a name, and its child."""

    server: subprocess.Popen[bytes]
    stub: int


def _pair(folder: Path, name: str) -> Iterator[Pair]:
    (folder / name).symlink_to(sys.executable)
    server = subprocess.Popen([folder / name, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdout is not None
    stub = int(server.stdout.readline())
    yield Pair(server, stub)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(stub).kill()
    server.kill()
    server.communicate()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    yield from _pair(tmp_path, "tritonserver")


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Pair]:
    yield from _pair(tmp_path, "notebook")


@pytest.fixture
async def guard() -> AsyncIterator[ServerGuard]:
    guard = ServerGuard(enabled=True)
    yield guard
    guard.close()


def _kill(pid: int) -> None:
    """Returns when it is a zombie: its parent does not care."""
    pidfd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert select.select([pidfd], [], [], SOON_S)[0]
    os.close(pidfd)


async def test_a_stub_that_died_takes_its_server_with_it(guard: ServerGuard, pair: Pair) -> None:
    guard.took_lease(HOLDER, pair.stub)
    _kill(pair.stub)
    guard.lease_ended(HOLDER)
    assert pair.server.wait(timeout=SOON_S) == -signal.SIGKILL


async def test_a_stub_that_is_stopped_takes_its_server_with_it(guard: ServerGuard, pair: Pair) -> None:
    guard.took_lease(HOLDER, pair.stub)
    os.kill(pair.stub, signal.SIGSTOP)
    stub = os.pidfd_open(pair.stub)
    assert await asyncio.to_thread(pair.server.wait, SOON_S) == -signal.SIGKILL
    assert (await asyncio.to_thread(select.select, [stub], [], [], SOON_S))[0], "it holds its lease for ever"
    os.close(stub)


async def test_a_stub_that_gave_its_lease_back_ends_alone(guard: ServerGuard, pair: Pair) -> None:
    guard.took_lease(HOLDER, pair.stub)
    guard.gave_back(HOLDER)
    _kill(pair.stub)
    guard.lease_ended(HOLDER)
    assert pair.server.poll() is None


async def test_a_stub_that_lives_and_only_lost_its_lease_ends_nobody(guard: ServerGuard, pair: Pair) -> None:
    guard.took_lease(HOLDER, pair.stub)
    guard.lease_ended(HOLDER)
    assert pair.server.poll() is None


async def test_the_parent_of_a_script_is_never_killed(guard: ServerGuard, other: Pair) -> None:
    guard.took_lease(HOLDER, other.stub)
    _kill(other.stub)
    guard.lease_ended(HOLDER)
    assert other.server.poll() is None


async def test_without_the_setting_nobody_is_killed(pair: Pair) -> None:
    guard = ServerGuard(enabled=False)
    guard.took_lease(HOLDER, pair.stub)
    _kill(pair.stub)
    guard.lease_ended(HOLDER)
    assert pair.server.poll() is None
