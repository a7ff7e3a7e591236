"""Steps that are late, and a scheduler that is silent."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq.asyncio

from minisgl_backend.actors.executors import process
from minisgl_backend.actors.executors.group import GroupDied
from minisgl_backend.actors.executors.process import GroupSettings
from minisgl_backend.actors.mailbox import LocalMailbox
from minisgl_backend.actors.watchdog import _LOOKS as LOOKS
from minisgl_backend.actors.watchdog import Watchdog, describe_plan
from minisgl_backend.config import EngineConfig
from minisgl_backend.device.placement import Placement
from minisgl_backend.messages.control import Begin, Halt, Late
from minisgl_backend.messages.engine import Probe, TextToScheduler
from minisgl_backend.messages.plan import Admission, BatchPlan, PageGrant
from minisgl_backend.messages.sampling import Sampling
from minisgl_backend.messages.tokens import pack_tokens

SOON_S = 30.0
DAY_S = 86_400.0
"""A limit at which it never looks by itself."""


def plan(step: int, rows: int = 1) -> BatchPlan:
    slots = tuple(range(rows))
    return BatchPlan(step, (), (), slots, (7,) * rows, (1,) * rows, (1,) * rows)


class _Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


@asynccontextmanager
async def _watching(clock: _Clock, limit_s: float = 0.02) -> AsyncIterator[tuple[Watchdog, asyncio.Queue[Late]]]:
    """A second of the clock is longer than any step may take; it looks every millisecond."""
    told: asyncio.Queue[Late] = asyncio.Queue()
    watchdog = Watchdog(limit_s, told.put_nowait, clock)
    watchdog.start()
    yield watchdog, told
    watchdog.close()


async def _looked(watchdog: Watchdog) -> None:
    """It has looked since."""
    looked = asyncio.Event()
    start = watchdog.start

    def look_again() -> None:
        looked.set()
        start()

    watchdog.start = look_again  # type: ignore[method-assign]
    await asyncio.wait_for(looked.wait(), SOON_S)


async def test_a_step_that_is_not_answered_is_told_once_with_the_last_plans(clock: _Clock) -> None:
    async with _watching(clock) as (watchdog, told):
        for step in range(1, 11):
            watchdog.handed_out(plan(step))
            watchdog.answered(step)
        watchdog.handed_out(plan(11))
        watchdog.handed_out(plan(12))
        clock.now_s += 1.0
        late = await asyncio.wait_for(told.get(), SOON_S)
        assert late.step == 11 and late.waited_s == 1.0
        assert [line.split(":")[0] for line in late.plans] == [f"step {step}" for step in range(5, 13)]
        await asyncio.sleep(0.01)
        assert told.empty()


def _looks(watchdog: Watchdog, count: int) -> None:
    for _ in range(count):
        watchdog._look()


async def test_the_time_of_a_step_begins_when_the_one_before_it_is_answered(clock: _Clock) -> None:
    async with _watching(clock, limit_s=DAY_S) as (watchdog, told):
        watchdog.handed_out(plan(1))
        watchdog.handed_out(plan(2))
        _looks(watchdog, LOOKS)
        watchdog.answered(1)
        _looks(watchdog, LOOKS)
        assert told.empty(), "found as often as two steps may be, but each only half as often"
        _looks(watchdog, 1)
        assert told.get_nowait().step == 2


async def test_a_step_that_was_stopped_together_with_its_watchdog_is_not_late(clock: _Clock) -> None:
    async with _watching(clock, limit_s=DAY_S) as (watchdog, told):
        watchdog.handed_out(plan(1))
        _looks(watchdog, LOOKS - 1)
        clock.now_s += 100 * DAY_S  # Ctrl-Z, a frozen container
        _looks(watchdog, 1)
        assert told.empty()


async def test_who_has_nothing_to_do_is_not_late(clock: _Clock) -> None:
    async with _watching(clock) as (watchdog, told):
        clock.now_s += 1000.0
        await _looked(watchdog)
        watchdog.handed_out(plan(1))
        watchdog.answered(1)
        clock.now_s += 1000.0
        await _looked(watchdog)
        watchdog.handed_out(plan(2))  # its time begins now
        await _looked(watchdog)
        assert told.empty()


async def test_without_a_limit_a_step_takes_as_long_as_it_takes(clock: _Clock) -> None:
    async with _watching(clock, limit_s=0.0) as (watchdog, told):
        watchdog.handed_out(plan(1))
        clock.now_s += 1e9
        assert watchdog._timer is None and told.empty()


def test_a_described_plan_tells_rows_and_lengths_and_no_tokens() -> None:
    admission = Admission(3, pack_tokens([123456, 654321]), Sampling(0.0, 0, 1.0, 0, 0))
    chunk = BatchPlan(9, (admission,), (PageGrant(3, (1, 2)),), (0, 3), (7, 0), (1, 2), (1, 0))
    line = describe_plan(chunk)
    assert line == (
        "step 9: 2 rows (slot:start+length, s: samples) 0:7+1s 3:0+2; 2 pages granted; admitted (slot:tokens) 3:2"
    )
    assert describe_plan(plan(1, rows=70)).count("7+1s") == 64 and "and 6 more" in describe_plan(plan(1, rows=70))


@pytest.fixture
async def members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[process._Members]:
    """The host's side of a group without processes, in a hurry."""
    monkeypatch.setattr(process, "_ASK_EVERY_S", 0.005)
    context, home = zmq.asyncio.Context(), Path(tempfile.mkdtemp(prefix="minisgl-", dir="/tmp")) / "g1"
    home.mkdir()
    members = process._Members(home, GroupSettings(EngineConfig(), "", Placement((), ())), context)
    yield members
    await members.stop()
    context.destroy(linger=0)
    shutil.rmtree(home.parent)


def _asked(members: process._Members) -> LocalMailbox[TextToScheduler | Begin | Halt]:
    """What the scheduler gets."""
    asked: LocalMailbox[TextToScheduler | Begin | Halt] = LocalMailbox(100)
    members._outlets["scheduler"] = asked  # type: ignore[assignment]
    members._processes["scheduler"] = _Ended()  # type: ignore[assignment]
    return asked


class _Ended:
    pid, returncode = 2**22 + 1, 0  # beyond any pid of Linux


async def test_a_silent_scheduler_ends_its_group_and_the_report_is_named(members: process._Members) -> None:
    asked = _asked(members)
    with pytest.raises(GroupDied, match=r"scheduler: does not answer.*hang-g1.txt"):
        await asyncio.wait_for(members.watch_scheduler(), SOON_S)
    assert isinstance(asked.receive_nowait(), Probe)
    report = (members._home.parent / "hang-g1.txt").read_text()
    assert "has not answered" in report and "it did not answer" in report


async def test_a_scheduler_that_answers_when_it_is_asked_lives_on(members: process._Members) -> None:
    asked = _asked(members)
    watching = asyncio.create_task(members.watch_scheduler())
    for _ in range(3 * process._SILENT_LOOKS):
        assert isinstance(await asyncio.wait_for(asked.receive(), SOON_S), Probe)
        members._heard = True
    assert not watching.done()
    watching.cancel()
