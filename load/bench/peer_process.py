"""One engine under the peer benchmark, as the benchmark sees it: a child process that speaks JSON lines.

    with start(runner, ready_s) as engine:
        engine.generate(prompts, tokens)  →  Round

Ours and the peers' are driven alike (`load/peers/line.py` is the other end). Everything an engine starts is ended with
the block. CPU time and memory are those of the child, of all its descendants, and of the processes it names.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from load.peers.line import Prompts, Ready, Stream

_ROOT = Path(__file__).resolve().parents[2]
_END_S = 60.0
_LOG_LINES = 15


class EngineBroke(Exception):
    """The engine did not start, did not answer, or answered what was not asked: in a sentence."""


@dataclass(frozen=True)
class Runner:
    """How to start one engine."""

    name: str  # as in the report: "openvino:fp32"
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Usage:
    """What the processes of an engine have used since their start."""

    cpu_s: float  # all of them
    driver_cpu_s: float  # the child alone
    machine_cpu_s: float  # of everybody on this machine

    def since(self, earlier: Usage) -> Usage:
        """The part that came after `earlier`."""
        return Usage(
            self.cpu_s - earlier.cpu_s,
            self.driver_cpu_s - earlier.driver_cpu_s,
            max(self.machine_cpu_s - earlier.machine_cpu_s, 0.0),  # a sum of floats over all CPUs
        )


@dataclass(frozen=True)
class Round:
    """All prompts at once, answered."""

    streams: tuple[Stream, ...]
    wall_s: float  # as the benchmark saw it
    usage: Usage


class Engine:
    """A started engine. One command at a time."""

    def __init__(self, runner: Runner, process: subprocess.Popen[str], log: Path) -> None:
        self.runner = runner
        self._process = process
        self._log = log
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.ready = Ready("", "", "")

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._process.pid

    def await_ready(self, patience_s: float) -> None:
        """Raises EngineBroke when the engine says anything else, or nothing in time."""
        self.ready = Ready(**self._answer("ready", patience_s))

    def generate(self, prompts: Prompts, tokens: int, patience_s: float = 3600.0) -> Round:
        """Exactly `tokens` tokens of every prompt, greedy. Raises EngineBroke."""
        before, start = self.usage(), time.perf_counter()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # its last word, or its end, is found by _answer
            self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
            self._process.stdin.flush()
        streams = tuple(Stream(**fields) for fields in self._answer("streams", patience_s))
        wall_s, usage = time.perf_counter() - start, self.usage().since(before)
        lengths = [len(stream.token_ids) for stream in streams]
        if lengths != [tokens] * len(prompts) or any(sum(stream.tokens) != tokens for stream in streams):
            wanted = f"{len(prompts)} times {tokens}"
            raise EngineBroke(f"{self.runner.name} gave {lengths} tokens instead of {wanted}{self._tail()}")
        return Round(streams, wall_s, usage)

    def usage(self) -> Usage:
        """Of this moment."""
        cpu_s = {process.pid: _cpu_s(process) for process in self.processes()}
        machine = psutil.cpu_times()
        busy_s = sum(machine) - machine.idle - getattr(machine, "iowait", 0.0) - getattr(machine, "guest", 0.0)
        return Usage(sum(cpu_s.values()), cpu_s.get(self.pid, 0.0), busy_s)

    def peak_bytes(self) -> int:
        """Sum over its processes of the most that each had resident; what they share counts in each."""
        return sum(_peak_bytes(process.pid) for process in self.processes())

    def processes(self) -> list[psutil.Process]:
        """The child, its descendants and those it named with theirs: each once, in order of pid."""
        found: dict[int, psutil.Process] = {}
        for pid in (self.pid, *self.ready.pids):
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                found |= {one.pid: one for one in (process, *process.children(recursive=True))}
        return [found[pid] for pid in sorted(found)]

    def end(self) -> None:
        """Closes its input, waits for its end, and kills what is left."""
        left = self.processes()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _, alive = psutil.wait_procs(left, timeout=_END_S)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._reader.join(_END_S)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _answer(self, key: str, patience_s: float) -> Any:
        try:
            line = self._lines.get(timeout=patience_s)
        except queue.Empty:
            raise EngineBroke(f"{self.runner.name} said nothing for {patience_s:g} s{self._tail()}") from None
        if line is None:
            raise EngineBroke(f"{self.runner.name} ended: {_why(self._process.wait())}{self._tail()}")
        try:
            message = json.loads(line)
        except json.JSONDecodeError:
            raise EngineBroke(f"{self.runner.name} wrote no JSON: {line[:200]!r}") from None
        if key not in message:
            raise EngineBroke(f"{self.runner.name}: {message.get('error', line[:200])}{self._tail()}")
        return message[key]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return "".join(f"\n    {line}" for line in lines)


@contextmanager
def start(runner: Runner, logs: Path, ready_s: float) -> Iterator[Engine]:
    """The engine, ready. logs: folder for what it prints."""
    log = logs / f"{runner.name.replace(':', '-')}.log"
    environment = {**os.environ, **dict(runner.environment), "PYTHONPATH": str(_ROOT)}
    with log.open("wb") as file:
        process = subprocess.Popen(
            runner.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            cwd=_ROOT,
            env=environment,
        )
    engine = Engine(runner, process, log)
    try:
        engine.await_ready(ready_s)
        yield engine
    finally:
        engine.end()


def _why(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"{name}, an instruction that this processor does not have" if name == "SIGILL" else name


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _peak_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
