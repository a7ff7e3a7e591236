"""Where the time of a start goes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from minisgl_backend.actors.executors.group import Deliver, Group, Say
from minisgl_backend.actors.internal import EngineUp, StateChanged, ToText
from minisgl_backend.actors.mailbox import LocalMailbox
from minisgl_backend.actors.start_times import StartTimes, stage_of
from minisgl_backend.actors.supervisor import Supervisor

LINES = (
    "importing torch",
    "loading weights on cpu (AVX2, 2 threads) in float32",
    "5825 KV pages of 16 tokens, 4095 MiB",
)


def clock(*times: float) -> Iterator[float]:
    yield from times


def test_each_stage_ends_where_the_next_begins_and_together_they_are_the_whole_start() -> None:
    times = clock(1.5, 3.5, 3.75, 4.75)
    start = StartTimes(1.0, lambda: next(times))
    for line in ("worker-0: 2 threads", *LINES):
        start.note(line)
    assert start.report() == "started in 3.8 s (processes 0.5, torch 2.0, weights 0.2, warm up 1.0)"


def test_a_line_that_begins_no_stage_belongs_to_the_present_one() -> None:
    assert [stage_of(line) for line in LINES] == ["torch", "weights", "warm up"]
    assert stage_of("starting") == stage_of("waiting: another engine of this user takes its memory") == ""


def test_without_a_device_to_warm_up_the_start_is_its_processes() -> None:
    assert StartTimes(0.0, lambda: 0.5).report() == "started in 0.5 s (processes 0.5)"


class _Group:
    """An executor whose groups say LINES and are ready."""

    @asynccontextmanager
    async def open(self, generation: int, deliver: Deliver, say: Say) -> AsyncIterator[Group]:
        for line in LINES:
            say(line)
        yield Group(LocalMailbox(8), 4, (), ("worker-0: 1 thread",))


async def test_a_group_that_is_ready_tells_how_it_computes_and_the_seconds_of_its_stages() -> None:
    to_text: LocalMailbox[ToText] = LocalMailbox(64)
    supervisor = Supervisor(_Group(), to_text, page_size=16, max_restarts=0)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(supervisor.run())
        message = await to_text.receive()
        while isinstance(message, StateChanged):
            message = await to_text.receive()
        running.cancel()
    assert isinstance(message, EngineUp)
    assert message.start.startswith("worker-0: 1 thread, started in "), "also for who came after it was first said"
    assert re.search(r"\(processes \d+\.\d, torch \d+\.\d, weights \d+\.\d, warm up \d+\.\d\)", message.start)
