"""Nobody is sent a plan before every rank has answered: the scheduler is told to begin last of all."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio

from minisgl_backend.actors.child import run_scheduler
from minisgl_backend.actors.executors.process import CAPACITY, GroupSettings, _Members
from minisgl_backend.actors.wire import WireInbox, WireOutlet
from minisgl_backend.config import EngineConfig
from minisgl_backend.device.placement import Placement, WorkerPlace
from minisgl_backend.messages.control import Begin, FromChild, Halt, Loading, Ready, ToChild

PATIENCE_S = 60.0


class _Child:
    """A process that is started and never ends."""

    pid = 4242
    returncode = None

    async def wait(self) -> int:
        await asyncio.Event().wait()
        return 0


class _StartingGroup:
    """A group of two ranks on its way up, whose children are played by the test."""

    def __init__(self, home: Path, context: zmq.asyncio.Context) -> None:
        two_ranks = Placement((WorkerPlace(1, (), 0),) * 2, ())
        self._members = _Members(home, GroupSettings(EngineConfig(), "none", two_ranks), context)
        self._child: WireOutlet[FromChild] = WireOutlet(context, home / "host", CAPACITY)
        self.scheduler: WireInbox[ToChild] = WireInbox(context, home / "scheduler", ToChild, CAPACITY)
        self.said: asyncio.Queue[str] = asyncio.Queue()
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> _StartingGroup:
        await self._tasks.__aenter__()
        self.started = self._tasks.create_task(self._members.start(self._tasks, self.said.put_nowait, 100))
        return self

    async def __aexit__(self, *exception: object) -> None:
        for task in tuple(self._tasks._tasks):
            task.cancel()
        await self._tasks.__aexit__(None, None, None)

    def tell(self, *messages: FromChild) -> None:
        for message in messages:
            self._child.put(message)

    async def heard(self, line: str) -> bool:
        """Whether the host, still waiting, has read everything up to this line of a child."""
        self.tell(Loading("worker-1", line))
        saying = asyncio.ensure_future(self.said.get())
        done, _ = await asyncio.wait({saying, self.started}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        saying.cancel()
        return self.started not in done and saying in done and saying.result() == line


@pytest.fixture
async def group(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[_StartingGroup]:
    async def start(*arguments: Any, **options: Any) -> _Child:
        return _Child()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    context = zmq.asyncio.Context()
    with tempfile.TemporaryDirectory(prefix="minisgl-test-") as folder:
        async with _StartingGroup(Path(folder), context) as starting:
            yield starting
        context.destroy(linger=0)


async def test_fault_5_the_scheduler_may_not_begin_before_every_rank_has_answered(group: _StartingGroup) -> None:
    assert await group.heard("starting")
    group.tell(Ready("scheduler", 1, 0), Ready("worker-0", 2, 70))
    assert await group.heard("rank 1 still loads"), "the start ended without rank 1"
    assert group.scheduler.receive_nowait() is None
    group.tell(Ready("worker-1", 3, 50))
    assert (await asyncio.wait_for(group.started, PATIENCE_S)).num_pages == 50
    begin = await asyncio.wait_for(group.scheduler.receive(), PATIENCE_S)
    assert begin == Begin(50, 100), "the smallest pool is what all have"


async def test_a_scheduler_that_is_halted_before_it_may_begin_ends_without_a_word() -> None:
    context = zmq.asyncio.Context()
    with tempfile.TemporaryDirectory(prefix="minisgl-test-") as folder:
        home = Path(folder)
        heard: WireInbox[FromChild] = WireInbox(context, home / "host", FromChild, CAPACITY)
        host: WireOutlet[Any] = WireOutlet(context, home / "host", CAPACITY)
        to_scheduler: WireOutlet[ToChild] = WireOutlet(context, home / "scheduler", CAPACITY)
        settings = GroupSettings(EngineConfig(), "none", Placement((), ()))
        try:
            async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
                running = tasks.create_task(run_scheduler(home, settings, context, host))
                assert isinstance(await heard.receive(), Ready)
                to_scheduler.put(Halt())
                await running
            assert heard.receive_nowait() is None
        finally:
            context.destroy(linger=0)


async def test_a_rank_that_says_twice_that_it_is_ready_does_not_count_for_another(group: _StartingGroup) -> None:
    group.tell(Ready("scheduler", 1, 0), Ready("worker-0", 2, 70), Ready("worker-0", 2, 70))
    assert await group.heard("rank 1 still loads")
