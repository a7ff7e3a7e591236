"""Where an engine's processes meet, and how it learns that nobody needs it any more."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from minisgl_backend.actors.internal import HolderId
from minisgl_backend.actors.lease import Leases
from minisgl_backend.actors.rundir import (
    RUNTIME_VARIABLE,
    engine_dir,
    is_locked,
    locked,
    memory_turn,
    prune,
    ranks_turn,
)
from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import ConfigError


@pytest.fixture
def runtime(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = Path("/tmp") / f"minisgl-test-{os.getpid()}"
    monkeypatch.setenv(RUNTIME_VARIABLE, str(root))
    return root


def test_the_folder_is_open_to_its_owner_alone(runtime: Path) -> None:
    folder = engine_dir(EngineConfig())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(runtime.stat().st_mode) == 0o700


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.setenv(RUNTIME_VARIABLE, str(tmp_path))
    with pytest.raises(ConfigError, match="0700"):
        engine_dir(EngineConfig())


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "minisgl").symlink_to(tmp_path / "real")
    monkeypatch.delenv(RUNTIME_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match="must be a folder that belongs"):
        engine_dir(EngineConfig())


def test_a_relative_folder_means_the_same_from_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:  # a short path: sockets would lie in it
        monkeypatch.chdir(folder)
        monkeypatch.setenv(RUNTIME_VARIABLE, "run")
        assert engine_dir(EngineConfig()).is_absolute()
        monkeypatch.undo()


def test_folders_of_engines_that_ended_long_ago_are_removed(tmp_path: Path) -> None:
    for name in ("mine", "old", "fresh", "strange"):
        (tmp_path / name).mkdir()
    for name in ("mine", "old", "fresh"):
        (tmp_path / name / "engine.log").touch()
    for name in ("mine", "old"):
        os.utime(tmp_path / name / "engine.log", (0, 0))
    prune(tmp_path / "mine")
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["fresh", "mine", "strange"]


def test_a_folder_too_deep_for_sockets_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUNTIME_VARIABLE, str(tmp_path / ("x" * 100)))
    with pytest.raises(ConfigError, match=RUNTIME_VARIABLE):
        engine_dir(EngineConfig())


def test_the_same_settings_meet_and_others_do_not(runtime: Path) -> None:
    assert engine_dir(EngineConfig()) == engine_dir(EngineConfig())
    assert engine_dir(EngineConfig()) != engine_dir(EngineConfig(page_size=32))
    assert engine_dir(EngineConfig()) != engine_dir(EngineConfig(model="other"))


def test_a_lock_is_seen_while_it_is_held_and_free_afterwards(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    assert not is_locked(lock)
    with locked(lock):
        assert is_locked(lock)
    assert not is_locked(lock)


def test_engines_take_their_memory_one_after_another_and_who_waits_says_so(tmp_path: Path) -> None:
    order: list[str] = []
    waits = threading.Event()

    def second() -> None:
        with memory_turn(tmp_path, waits.set):
            order.append("second")

    with memory_turn(tmp_path, lambda: order.append("the first waits for nobody")):
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(60.0)
        order.append("first")
    thread.join(60.0)
    assert order == ["first", "second"]
    assert list(tmp_path.iterdir()) == []


def test_no_rank_takes_its_memory_before_rank_0_has_the_turn_of_all(tmp_path: Path) -> None:
    home = tmp_path / "engine" / "g1"
    home.mkdir(parents=True)
    order: list[str] = []
    waits = threading.Event()

    def takes(rank: int) -> None:
        with ranks_turn(home, rank, waits.set):
            order.append("rank")

    ranks = [threading.Thread(target=takes, args=(rank,)) for rank in (2, 1, 0)]
    with memory_turn(tmp_path, lambda: None):
        for thread in ranks:
            thread.start()
        assert waits.wait(60.0)
        order.append("another engine")
    for thread in ranks:
        thread.join(60.0)
    assert order == ["another engine", "rank", "rank", "rank"]


async def test_a_lease_ends_with_its_process_however_that_ends() -> None:
    ended: asyncio.Queue[HolderId] = asyncio.Queue()
    leases = Leases(ended.put_nowait)
    holder = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)
    leases.take(HolderId(b"a"), holder.pid)
    leases.take(HolderId(b"b"), holder.pid)
    leases.take(HolderId(b"b"), holder.pid)
    assert len(leases) == 2
    holder.kill()
    async with asyncio.timeout(60):
        assert {await ended.get(), await ended.get()} == {b"a", b"b"}
    await holder.wait()
    assert len(leases) == 0
    leases.take(HolderId(b"c"), holder.pid)  # it is gone already
    assert await ended.get() == b"c"
    leases.close()


async def test_a_lease_given_back_ends_once() -> None:
    ended: list[HolderId] = []
    leases = Leases(ended.append)
    leases.take(HolderId(b"a"), os.getpid())
    leases.end(HolderId(b"a"))
    leases.end(HolderId(b"a"))
    leases.end(HolderId(b"never"))
    assert ended == [b"a"]
