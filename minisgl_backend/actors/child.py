"""Entry of a scheduler or worker process: `python -m minisgl_backend.actors.child ROLE HOME PARENT_PID`.

Started only by actors/executors/process.py, whose handshake it answers. Prints to the engine's log.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq.asyncio

from minisgl_backend.actors.executors.build import make_scheduler, token_bytes_of
from minisgl_backend.actors.executors.process import CAPACITY, GroupSettings
from minisgl_backend.actors.parent_death import die_with
from minisgl_backend.actors.rundir import ranks_turn
from minisgl_backend.actors.scheduler import SchedulerActor, ToScheduler
from minisgl_backend.actors.stacks import tell_stacks_on_signal
from minisgl_backend.actors.step_trace import FIRST_WORKER_TRACK, SCHEDULER_TRACK, StepTrace
from minisgl_backend.actors.watchdog import Watchdog
from minisgl_backend.actors.wire import WireInbox, WireOutlet
from minisgl_backend.actors.worker import ToWorker, WorkerActor, in_place
from minisgl_backend.distributed.seat import Seat
from minisgl_backend.errors import StartError
from minisgl_backend.messages.control import Begin, Broken, FromChild, Halt, Loading, Ready
from minisgl_backend.messages.engine import SchedulerToText
from minisgl_backend.messages.plan import BatchPlan, StepResult

if TYPE_CHECKING:
    from minisgl_backend.worker.runner import StepRunner


async def run_scheduler(home: Path, settings: GroupSettings, context: zmq.asyncio.Context, host: _Host) -> None:
    """Until Halt."""
    inbox: WireInbox[ToScheduler] = WireInbox(context, home / "scheduler", ToScheduler, CAPACITY)
    host.put(Ready("scheduler", os.getpid(), 0))
    begin = await inbox.receive()
    if isinstance(begin, Halt):  # while the workers load
        return
    assert isinstance(begin, Begin), begin
    scheduler = make_scheduler(settings.config, begin.num_pages, begin.context_tokens)
    workers: list[WireOutlet[BatchPlan]] = [
        WireOutlet(context, home / f"worker-{rank}", CAPACITY) for rank in range(len(settings.placement.workers))
    ]
    trace = StepTrace(_trace_file(settings), "scheduler", SCHEDULER_TRACK)
    watchdog = Watchdog(settings.config.step_limit_s, host.put)
    gc.freeze()
    try:
        await SchedulerActor(scheduler, inbox, host, workers, trace, watchdog).run()
    finally:
        trace.close()


async def run_worker(rank: int, home: Path, settings: GroupSettings, context: zmq.asyncio.Context, host: _Host) -> None:
    """Until Halt."""
    place = settings.placement.workers[rank]
    if place.cpus:
        os.sched_setaffinity(0, place.cpus)  # before there are threads that would not inherit it
    config = msgspec.structs.replace(settings.config, threads=place.threads)
    from minisgl_backend.worker.build import build_runner, import_torch

    role = f"worker-{rank}"
    inbox: WireInbox[ToWorker] = WireInbox(context, home / role, ToWorker, CAPACITY)

    def say(line: str) -> None:
        host.put(Loading(role, line))

    folder = Path(settings.model_folder)

    def waits() -> None:
        say("waiting: another engine of this user takes its memory")

    import_torch(config, folder, say)
    token_bytes = token_bytes_of(folder)
    seat = Seat(rank, len(settings.placement.workers), settings.ranks_memory, home / "meeting")
    with ranks_turn(home, rank, waits):
        runner: StepRunner = build_runner(config, folder, seat, say, token_bytes)
        runner.warm_up()  # what it counted on is taken then
    trace = StepTrace(_trace_file(settings), role, FIRST_WORKER_TRACK + rank)
    try:
        host.put(Ready(role, os.getpid(), runner.num_pages))
        to_scheduler: WireOutlet[StepResult] | None = (
            WireOutlet(context, home / "scheduler", CAPACITY) if rank == 0 else None
        )
        gc.freeze()
        await WorkerActor(in_place(runner.launch), inbox, to_scheduler, trace).run()
    finally:
        trace.close()
        runner.close()


def _trace_file(settings: GroupSettings) -> Path | None:
    return Path(settings.config.step_trace) if settings.config.step_trace else None


_Host = WireOutlet[FromChild | SchedulerToText]


async def _main(role: str, home: Path) -> int:
    settings = msgspec.json.decode((home / "engine.json").read_bytes(), type=GroupSettings)
    context = zmq.asyncio.Context()
    host: _Host = WireOutlet(context, home / "host", CAPACITY)
    try:
        if role == "scheduler":
            await run_scheduler(home, settings, context, host)
        else:
            await run_worker(int(role.removeprefix("worker-")), home, settings, context, host)
        return 0
    except Exception as error:
        traceback.print_exc()
        fatal = isinstance(error, StartError)
        line = str(error) if fatal else f"{type(error).__name__}: {error}".splitlines()[0]
        host.put(Broken(role, line, fatal, error.exit_code if isinstance(error, StartError) else 1))
        return 1
    finally:
        context.destroy(linger=500)


def main() -> None:
    """Runs one role until the host halts it or ends."""
    role, home, parent = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    die_with(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C at the terminal is the host's to answer
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable()  # of a crash in native code the log tells where it was
    tell_stacks_on_signal(home, role)
    sys.exit(asyncio.run(_main(role, home)))


if __name__ == "__main__":
    main()
