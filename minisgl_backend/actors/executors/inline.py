"""The inline executor: scheduler and worker as tasks of the host's own loop. For tests, debugging and small scripts.

The actors are the very same; only their mailboxes are local and the step runs in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from minisgl_backend.actors.executors.group import Deliver, Group, GroupDied, Say, first_death
from minisgl_backend.actors.mailbox import LocalMailbox
from minisgl_backend.actors.scheduler import SchedulerActor, ToScheduler
from minisgl_backend.actors.step_trace import FIRST_WORKER_TRACK, SCHEDULER_TRACK, StepTrace
from minisgl_backend.actors.worker import Compute, ToWorker, WorkerActor
from minisgl_backend.errors import StartError
from minisgl_backend.messages.engine import SchedulerToText
from minisgl_backend.scheduler.scheduler import Scheduler

_CAPACITY = 65_536
"""Bound of the mailboxes, in messages, as between processes."""


class Rank(Protocol):
    """One rank, loaded and warmed up."""

    num_pages: int
    compute: Compute

    def close(self) -> None: ...


class InlineExecutor:
    """`build_rank` loads the model (it may block: it runs in a thread); `make_scheduler` gets its number of pages."""

    def __init__(
        self,
        build_rank: Callable[[Say], Rank],
        make_scheduler: Callable[[int], Scheduler],
        trace_file: Path | None = None,
        placement: tuple[str, ...] = (),
    ) -> None:
        """placement: how the worker computes, a line each (device/placement.py)."""
        self._build_rank = build_rank
        self._make_scheduler = make_scheduler
        self._trace_file = trace_file
        self._placement = placement

    @asynccontextmanager
    async def open(self, generation: int, deliver: Deliver, say: Say) -> AsyncIterator[Group]:
        loop = asyncio.get_running_loop()

        def say_here(line: str) -> None:
            loop.call_soon_threadsafe(say, line)

        for line in self._placement:
            say(line)
        try:
            rank = await asyncio.to_thread(self._build_rank, say_here)
        except StartError as error:
            raise GroupDied("worker-0", str(error), fatal=True, exit_code=error.exit_code) from error
        except Exception as error:
            raise GroupDied("worker-0", f"{type(error).__name__}: {error}") from error
        scheduler_box: LocalMailbox[ToScheduler] = LocalMailbox(_CAPACITY)
        worker_box: LocalMailbox[ToWorker] = LocalMailbox(_CAPACITY)
        text_box: LocalMailbox[SchedulerToText] = LocalMailbox(_CAPACITY)
        traces = (
            StepTrace(self._trace_file, "scheduler", SCHEDULER_TRACK),
            StepTrace(self._trace_file, "worker-0", FIRST_WORKER_TRACK),
        )
        scheduler = SchedulerActor(
            self._make_scheduler(rank.num_pages), scheduler_box, text_box, (worker_box,), traces[0]
        )
        worker = WorkerActor(rank.compute, worker_box, scheduler_box, traces[1])

        async def forward() -> None:
            while True:
                await deliver(await text_box.receive())

        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_member("scheduler", scheduler.run()))
                tasks.create_task(_member("worker-0", worker.run()))
                tasks.create_task(forward())
                yield Group(scheduler_box, rank.num_pages, (), self._placement)
        except BaseExceptionGroup as errors:
            raise first_death(errors) or errors from None
        finally:
            for trace in traces:
                trace.close()
            rank.close()


async def _member(role: str, run: Coroutine[Any, Any, None]) -> None:
    try:
        await run
    except Exception as error:
        raise GroupDied(role, f"{type(error).__name__}: {error}") from error
    raise GroupDied(role, "ended")
