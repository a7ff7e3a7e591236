"""The engine host process: `python -m minisgl_backend.actors.host RUN_DIR READY_FD BEGAN_S`.

    door (leases, holders) ◄──► text actor ◄──► scheduler process ◄──► worker processes
                                    ▲
                                supervisor (starts and watches the group)

Started by actors/launch.py. Lives as long as somebody holds a lease, and some seconds more.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import zmq.asyncio

from minisgl_backend.actors.door import Door
from minisgl_backend.actors.executors.build import make_executor
from minisgl_backend.actors.internal import Front, Loaded, StateChanged, ToText
from minisgl_backend.actors.mailbox import LocalMailbox
from minisgl_backend.actors.rundir import try_lock
from minisgl_backend.actors.server_guard import ServerGuard
from minisgl_backend.actors.supervisor import Supervisor
from minisgl_backend.actors.text import TextActor
from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import StartError
from minisgl_backend.messages.client import EngineState
from minisgl_backend.models.limits import context_limit
from minisgl_backend.models.locate import locate_model
from minisgl_backend.text.defaults import sampling_defaults
from minisgl_backend.text.tokenizer import Tokenizer

TEXT_CAPACITY = 1 << 17
"""Bound of the text actor's mailbox, in messages."""

_LOCK_PATIENCE_S = 5.0
_log = logging.getLogger(__name__)


@asynccontextmanager
async def engine(
    config: EngineConfig, front: Front, inbox: LocalMailbox[ToText], run_dir: Path, began_s: float | None = None
) -> AsyncIterator[None]:
    """Text actor and supervisor run while the body does. A start that fails is told to the holders as FAILED.

    began_s: when the start began (monotonic), if that was earlier than now.
    """
    text = TextActor(config, inbox, front)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(text.run()), tasks.create_task(_bring_up(config, inbox, run_dir, began_s))]
        try:
            yield
        finally:
            for task in running:
                task.cancel()


async def _bring_up(config: EngineConfig, to_text: LocalMailbox[ToText], run_dir: Path, began_s: float | None) -> None:
    """Finds the model; then the tokenizer is loaded while the group starts. Whatever fails becomes FAILED."""
    try:
        folder = await asyncio.to_thread(locate_model, config.model)
        executor = await asyncio.to_thread(make_executor, config, folder, run_dir)
    except Exception as error:
        to_text.post(_failed(error))
        return
    supervisor = Supervisor(
        executor, to_text, page_size=config.page_size, max_restarts=config.max_restarts, began_s=began_s
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(load_text_side(config, to_text, folder))
        tasks.create_task(supervisor.run())


async def load_text_side(config: EngineConfig, to_text: LocalMailbox[ToText], folder: Path) -> None:
    """What the text actor needs of the model, in a thread. Whatever fails becomes FAILED."""
    try:
        tokenizer = await asyncio.to_thread(Tokenizer.load, folder)
        defaults = sampling_defaults(folder, config.generation_config)
        to_text.post(Loaded(tokenizer, context_limit(config, folder), defaults))
    except Exception as error:
        to_text.post(_failed(error))


def _failed(error: Exception) -> StateChanged:
    if isinstance(error, StartError):
        return StateChanged(EngineState.FAILED, str(error), error.exit_code)
    _log.error("the engine can not start", exc_info=error)
    return StateChanged(EngineState.FAILED, f"could not start: {type(error).__name__}: {error}", 1)


async def _host(config: EngineConfig, run_dir: Path, ready_fd: int, began_s: float) -> None:
    loop = asyncio.get_running_loop()
    context = zmq.asyncio.Context()
    inbox: LocalMailbox[ToText] = LocalMailbox(TEXT_CAPACITY)
    door = Door(context, run_dir / "door", inbox, config.lease_s, ServerGuard(config.end_server_with_stub))
    loop.add_signal_handler(signal.SIGTERM, door.deserted.set)
    (run_dir / "host.pid").write_text(f"{os.getpid()}\n")
    os.write(ready_fd, f"{os.getpid()}\n".encode())
    os.close(ready_fd)
    try:
        async with engine(config, door, inbox, run_dir, began_s), asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(door.run())
            await door.deserted.wait()
            reading.cancel()
        _log.info("the engine stops")
    finally:
        (run_dir / "host.pid").unlink(missing_ok=True)
        door.close()
        context.destroy(linger=500)


def _take_lock(path: Path) -> int:
    """Held until this process ends. A look by another process may hold it for an instant, so we try for a while."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + _LOCK_PATIENCE_S
    while not try_lock(lock):
        if time.monotonic() > deadline:
            sys.exit("another host holds this engine")
        time.sleep(0.01)
    return lock


def main() -> None:
    """Runs the host of the engine described by host.json in RUN_DIR."""
    run_dir, ready_fd, began_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    if os.fork():
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    _take_lock(run_dir / "host.lock")
    (run_dir / "host.pid").unlink(missing_ok=True)  # of a host that was killed
    config = msgspec.json.decode((run_dir / "host.json").read_bytes(), type=EngineConfig)
    code = 1
    try:
        asyncio.new_event_loop().run_until_complete(_host(config, run_dir, ready_fd, began_s))
        code = 0
    except Exception:
        _log.exception("the engine host breaks")
    finally:
        logging.shutdown()
        os._exit(code)  # a thread may still download or tokenise: nobody waits for it, and our lock must be free


if __name__ == "__main__":
    main()
