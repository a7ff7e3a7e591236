"""The process executor: scheduler and workers in processes of their own on this machine.

    1. the host binds its socket and starts the processes (actors/child.py)
    2. each child binds its own socket, loads what it needs, warms up, says Ready
    3. when all are Ready the host says Begin to the scheduler, the first to send: nobody sends to anybody before

A child dies with its host (parent-death signal); the host notices a child's death at once, kills one that was stopped,
and ends the group when a step is late or the scheduler does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import zmq.asyncio

from minisgl_backend.actors.executors.group import Deliver, Group, GroupDied, Say, first_death
from minisgl_backend.actors.mailbox import Undeliverable
from minisgl_backend.actors.stacks import write_report
from minisgl_backend.actors.stopped import PATIENCE_S, until_stopped
from minisgl_backend.actors.wire import WireInbox, WireOutlet
from minisgl_backend.config import EngineConfig
from minisgl_backend.device.placement import Placement
from minisgl_backend.distributed.seat import make_memory
from minisgl_backend.messages.control import Begin, Broken, FromChild, Halt, Late, Loading, Ready
from minisgl_backend.messages.engine import Probe, SchedulerToText, TextToScheduler

CAPACITY = 65_536
"""Bound of every mailbox between processes, in messages. The queue limit keeps real numbers far below."""

_HALT_PATIENCE_S = 2.0
_ASK_EVERY_S = 5.0
_SILENT_LOOKS = 6
"""A scheduler that says nothing is asked for its gauges; silent for so many looks, it hangs. It never computes for
longer than milliseconds, whatever the workers do.
"""
_log = logging.getLogger(__name__)


class GroupSettings(msgspec.Struct, frozen=True):
    """What a child reads at its start, from engine.json in the group's folder."""

    config: EngineConfig
    model_folder: str
    placement: Placement  # a worker for each rank
    ranks_memory: int = -1  # descriptor of what they share, the same in all; -1: there is one rank


class ProcessExecutor:
    """Starts the groups of one engine host below `run_dir`."""

    def __init__(
        self, config: EngineConfig, model_folder: Path, context_tokens: int, run_dir: Path, placement: Placement
    ) -> None:
        self._settings = GroupSettings(config, str(model_folder), placement)
        self._context_tokens = context_tokens
        self._run_dir = run_dir

    @asynccontextmanager
    async def open(self, generation: int, deliver: Deliver, say: Say) -> AsyncIterator[Group]:
        home = self._run_dir / f"g{generation}"
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(mode=0o700)
        with _memory_of(len(self._settings.placement.workers)) as memory:
            settings = msgspec.structs.replace(self._settings, ranks_memory=memory)
            (home / "engine.json").write_bytes(msgspec.json.encode(settings))
            context = zmq.asyncio.Context()
            members = _Members(home, settings, context)
            try:
                async with asyncio.TaskGroup() as tasks:
                    group = await members.start(tasks, say, self._context_tokens)
                    tasks.create_task(members.forward(deliver, say))
                    tasks.create_task(members.watch_scheduler())
                    yield group
            except BaseExceptionGroup as errors:
                raise first_death(errors) or errors from None
            finally:
                await asyncio.shield(members.stop())
                context.destroy(linger=0)
                shutil.rmtree(home, ignore_errors=True)


@contextmanager
def _memory_of(ranks: int) -> Iterator[int]:
    """A descriptor of what they share; -1: there is one rank."""
    memory = make_memory(ranks) if ranks > 1 else -1
    try:
        yield memory
    finally:
        if memory >= 0:
            os.close(memory)


class _Members:
    """The processes of one group, from the host's side."""

    def __init__(self, home: Path, settings: GroupSettings, context: zmq.asyncio.Context) -> None:
        self._home = home
        self._settings = settings
        self._context = context
        self._workers = {f"worker-{rank}": worker for rank, worker in enumerate(settings.placement.workers)}
        self._roles = ("scheduler", *self._workers)
        self._processes: dict[str, Process] = {}
        self._broken = asyncio.Event()
        self._heard = False  # anything since the last look
        self._inbox: WireInbox[SchedulerToText | FromChild] = WireInbox(
            context, home / "host", SchedulerToText | FromChild, CAPACITY
        )
        self._outlets: dict[str, WireOutlet[TextToScheduler | Begin | Halt]] = {}

    async def start(self, tasks: asyncio.TaskGroup, say: Say, context_tokens: int) -> Group:
        for line in self._settings.placement.lines:
            say(line)
        for role in self._roles:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "minisgl_backend.actors.child", role, str(self._home), str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL, env=self._environment(role), pass_fds=self._inherited(role),
            )  # fmt: skip
            self._processes[role] = process
            tasks.create_task(self._watch(role, process))
            tasks.create_task(self._watch_stopped(role, process))
            self._outlets[role] = WireOutlet(self._context, self._home / role, CAPACITY)
        num_pages = await self._all_ready(say)
        self._outlets["scheduler"].put(Begin(num_pages, context_tokens))
        pids = tuple((role, process.pid) for role, process in self._processes.items())
        return Group(self._outlets["scheduler"], num_pages, pids, self._settings.placement.lines)

    def _environment(self, role: str) -> dict[str, str]:
        given = dict(os.environ)
        return given | self._workers[role].environment(given) if role in self._workers else given

    def _inherited(self, role: str) -> tuple[int, ...]:
        memory = self._settings.ranks_memory
        return (memory,) if memory >= 0 and role in self._workers else ()

    async def _all_ready(self, say: Say) -> int:
        ready: dict[str, int] = {}
        while len(ready) < len(self._roles):
            message = await self._inbox.receive()
            if isinstance(message, Ready):
                ready[message.role] = message.num_pages
            else:
                self._note(message, say)
        return min(pages for role, pages in ready.items() if role != "scheduler")

    async def forward(self, deliver: Deliver, say: Say) -> None:
        """Hands the scheduler's messages on, and ends the group when a child says it is broken."""
        while True:
            message = await self._inbox.receive()
            self._heard = True
            if isinstance(message, Late):
                await self._end_late(message)
            elif isinstance(message, Loading | Ready | Broken):
                self._note(message, say)
            else:
                await deliver(message)

    async def watch_scheduler(self) -> None:
        """Ends the group when the scheduler hangs."""
        silent = 0
        while silent < _SILENT_LOOKS:
            await asyncio.sleep(_ASK_EVERY_S)
            if self._heard:
                silent, self._heard = 0, False
            else:
                silent += 1
                with contextlib.suppress(Undeliverable):
                    self._outlets["scheduler"].put(Probe())
        report = await self._report(f"the scheduler has not answered for {_ASK_EVERY_S * _SILENT_LOOKS:g} s")
        raise GroupDied("scheduler", f"does not answer; what it was doing: {report}")

    async def _end_late(self, late: Late) -> None:
        line = f"step {late.step} has taken {late.waited_s:.1f} s; the limit is the setting 'step_limit_s'"
        report = await self._report(line, "the last plans:", *late.plans)
        raise GroupDied("worker-0", f"{line}. Stacks and plans: {report}")

    async def _report(self, *lines: str) -> Path:
        """Of all processes, beside the group's folder, which goes with the group."""
        report = self._home.parent / f"hang-{self._home.name}.txt"
        pids = {role: process.pid for role, process in self._processes.items()}
        await write_report(report, lines, self._home, pids)
        return report

    def _note(self, message: object, say: Say) -> None:
        if isinstance(message, Broken):
            self._broken.set()
            raise GroupDied(message.role, message.message, fatal=message.fatal, exit_code=message.exit_code)
        if isinstance(message, Loading):
            say(message.line)

    async def _watch(self, role: str, process: Process) -> None:
        code = await process.wait()
        if code > 0:  # it ended by itself: its last word, if any, says more than its exit code
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._broken.wait(), 0.5)
        raise GroupDied(role, f"killed by signal {-code}" if code < 0 else f"exited with code {code}")

    async def _watch_stopped(self, role: str, process: Process) -> None:
        await until_stopped(process.pid)
        process.kill()
        raise GroupDied(role, f"was stopped by a signal for {PATIENCE_S:g} s, and killed")

    async def stop(self) -> None:
        """Halts what still runs, kills what does not halt in time, and reaps all."""
        running = [process for process in self._processes.values() if process.returncode is None]
        unhurt = len(running) == len(self._processes)
        for role, outlet in self._outlets.items():
            if unhurt and self._processes[role].returncode is None:
                with contextlib.suppress(Undeliverable):
                    outlet.put(Halt())
        if running and unhurt:
            waits = [asyncio.ensure_future(process.wait()) for process in running]
            await asyncio.wait(waits, timeout=_HALT_PATIENCE_S)
        for process in running:
            if process.returncode is None:
                process.kill()
        for process in running:
            await process.wait()
        for outlet in self._outlets.values():
            outlet.close()
        self._inbox.close()
