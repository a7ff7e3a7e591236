"""A real tritonserver for a test or a benchmark: `minisgl serve` as a user types it, on free ports, in a runtime
folder of its own, ended whatever happens.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from minisgl_backend.actors.connection import inspect
from minisgl_backend.actors.parent_death import signal_at_parents_end
from minisgl_backend.actors.rundir import RUNTIME_VARIABLE
from minisgl_backend.messages.client import Stats

T = TypeVar("T")

START_S = 300.0
STOP_S = 120.0
PATIENCE_S = 60.0
"""For what should come in a moment, on a machine that does much else: waiting for a state costs no more than it takes.
Where only the length of an answer tells that somebody noticed, count its steps: see `cut_short`.
"""


@dataclass
class Server:
    """A running `minisgl serve`."""

    process: subprocess.Popen[str]
    runtime: Path
    lines: list[str]
    http: str = ""  # http://host:port
    grpc: str = ""  # host:port
    metrics: str = ""  # http://host:port/metrics

    @property
    def ports(self) -> list[str]:
        """The options that give another server the same ports."""
        urls = (("http", self.http), ("grpc", self.grpc), ("metrics", self.metrics.removesuffix("/metrics")))
        return [part for name, url in urls for part in (f"--{name}-port", url.rpartition(":")[2])]

    @property
    def run_dir(self) -> Path:
        """The engine's folder: the only one below this server's runtime folder, which no other server shares."""
        (folder,) = self.runtime.iterdir()
        return folder

    def stats(self) -> Stats:
        """What the engine behind this server holds."""
        stats = asyncio.run(inspect(self.run_dir))
        assert stats is not None, "the engine is not there"
        return stats

    def until_idle(self, patience_s: float = PATIENCE_S) -> Stats:
        """Every request answered, every slot and page back."""

        def idle() -> Stats | None:
            stats = self.stats()
            busy = stats.open_requests or stats.waiting or stats.running
            return None if busy or stats.free_pages != stats.total_pages else stats

        return eventually(idle, patience_s, lambda: f"not idle: {self.stats()}")

    @contextmanager
    def cut_short(self, tokens: int) -> Iterator[None]:
        """Whoever leaves answers of so many tokens in the body is noticed before they end by themselves.

        Counted in steps of the engine, each of which is a token of each: seconds differ from machine to machine.
        """
        before = self.stats().steps
        yield
        steps = self.until_idle().steps - before
        assert steps < tokens, f"{steps} steps were run, as if nobody had left"

    def pid_of(self, name: str, model: str = "minisgl") -> int:
        """Of tritonserver, or of the Python stub of a model: each model has one."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            if name in child.name() and (name in "tritonserver" or f"/{model}/1/model.py" in " ".join(child.cmdline())):
                return child.pid
        raise AssertionError(f"no process {name!r} of {model!r} below minisgl serve")


@contextmanager
def serving(
    *arguments: str,
    runtime: Path | None = None,
    options: Sequence[str] = (),
    within: Sequence[str] = (),
    **settings: Any,
) -> Iterator[Server]:
    """`minisgl serve ARGUMENTS --set KEY=VALUE …`, ready.

    runtime: of several servers, and left to the caller; else one of its own, which goes with it. options: of
    tritonserver itself. within: a command that becomes ours with a world around it, such as `unshare`.
    """
    own = runtime is None
    runtime = Path(tempfile.mkdtemp(prefix="msg-")) if runtime is None else runtime
    sets = [option for key, value in settings.items() for option in ("--set", f"{key}={_written(value)}")]
    minisgl = Path(sys.executable).parent / "minisgl"
    command = [
        *within,
        str(minisgl),
        "serve",
        *free_ports(),
        *arguments,
        *sets,
        *(f"--triton-option={option}" for option in options),
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, RUNTIME_VARIABLE: str(runtime)},
        preexec_fn=signal_at_parents_end(signal.SIGTERM),
    )
    server = Server(process, runtime, [])
    reader = threading.Thread(target=_read, args=(process, server.lines), daemon=True)
    reader.start()
    try:
        _await_urls(server)
        yield server
    finally:
        stop(process)
        reader.join(timeout=5)
        assert process.stdout is not None
        process.stdout.close()
        if own:
            shutil.rmtree(runtime, ignore_errors=True)


def _written(value: Any) -> str:
    """A setting's value as `--set` reads it: JSON, or else a plain string."""
    return value if isinstance(value, str) else json.dumps(value)


def free_ports() -> list[str]:
    """`minisgl serve` then chooses."""
    return ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]


def stop(process: subprocess.Popen[str]) -> int:
    """As an operator would; killed when it does not obey."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.wait()
            raise
    return process.returncode


def engine_processes(runtime: Path) -> set[int]:
    """Hosts, schedulers and workers that were started with this runtime folder."""
    found = set()
    for process in psutil.process_iter():
        try:
            if any(str(runtime) in part for part in process.cmdline()):
                found.add(process.pid)
        except psutil.Error:
            continue
    return found


def is_alive(process: psutil.Process) -> bool:
    """A zombie is not."""
    try:
        return process.is_running() and bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def eventually(look: Callable[[], T | None], patience_s: float, failure: Callable[[], str]) -> T:
    """Looks again and again at a world that is not ours to be told by: processes, sockets, a server."""
    deadline = time.monotonic() + patience_s
    while True:
        if found := look():
            return found
        assert time.monotonic() < deadline, failure()
        time.sleep(0.05)


def _read(process: subprocess.Popen[str], lines: list[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip("\n"))


def _await_urls(server: Server) -> None:
    def found() -> bool:
        text = "\n".join(server.lines)
        assert server.process.poll() is None, f"minisgl serve ended:\n{text}"
        found = re.search(r"HTTP +(http://\S+)\s+gRPC +(\S+)\s+metrics +(\S+)", text)
        if found:
            server.http, server.grpc, server.metrics = found.groups()
        return bool(found)

    eventually(found, START_S, lambda: "minisgl serve is not ready:\n" + "\n".join(server.lines))
