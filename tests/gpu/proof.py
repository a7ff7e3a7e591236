"""Runs the parts of the proof one after another, each in processes and a time box of its own: see README.md.

    python proof.py OUT_FOLDER [--only PART …] [--seconds 480]

A part that fails, hangs or crashes costs its own result. OUT_FOLDER then holds a JSON file for each part, summary.json,
and run.log with all that the parts printed: 8 files, as many as come back from the machine at once. The exit code is 0
if all parts passed. Loads nothing but the standard library.

A kernel's first launch compiles it, half a second and more of one core for each of some hundreds. So the checks of the
first part, which time nothing, are shared out among processes that run at the same time; beside them one compiles ahead
what the later parts launch, and all find it in one cache.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Part:
    """box_s: its processes are ended after that."""

    name: str
    box_s: float
    commands: tuple[tuple[str, ...], ...]  # modules with arguments, at the same time
    ahead: tuple[tuple[str, ...], ...] = ()  # the same, on a GPU only


_DTYPES = ("float32", "float16", "bfloat16")
_NUMERICS = tuple(
    ("tests.gpu.parts", "numerics", "--only", module, "--dtype", dtype)
    for module in ("attention", "whole_model", "experts", "pointwise", "sampling")
    for dtype in _DTYPES
)


def _each_of(part: str, *dtypes: str) -> tuple[tuple[str, ...], ...]:
    return tuple(("tests.gpu.parts", part, "--dtype", dtype) for dtype in dtypes)


_CASES = tuple(("load.bench.kernels_gpu", "--check-only", "--shard", f"{shard}/4") for shard in range(4))

PARTS = (
    Part("numerics", 130, _NUMERICS, (("tests.gpu.compilation", "--ahead"), *_CASES)),
    Part("graphs", 60, _each_of("graphs", "float32", "bfloat16")),
    Part("overlap", 80, _each_of("overlap", "float32", "bfloat16")),
    Part("kernels", 50, (("load.bench.kernels_gpu",),)),
    Part("steps", 105, (("load.bench.step_gpu",),)),
    Part("flashinfer", 50, (("tests.gpu.parts", "flashinfer"),)),
)
"""In this order: a wrong number first, then what depends on it; what may be missing last."""


@dataclass(frozen=True)
class Machine:
    """What the parts run on."""

    gpu: str  # its name; empty: there is none, and Triton is interpreted
    python: str
    torch: str
    triton: str

    @property
    def at_once(self) -> int:
        """Processes of a part."""
        return max((os.cpu_count() or 1) if self.gpu else 2, 1)

    @property
    def patience(self) -> float:
        """By which time boxes are multiplied: where there is no GPU nothing is measured."""
        return 1.0 if self.gpu else 5.0


def main(given: Sequence[str] | None = None) -> int:
    """Runs them, prints and writes the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], default=[])
    parser.add_argument("--seconds", type=float, default=480.0, help="for all parts together, on a GPU")
    arguments = parser.parse_args(given)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / "run.log").open("w", encoding="utf-8", errors="replace") as file:
        parts = [part for part in PARTS if not arguments.only or part.name in arguments.only]
        return run_parts(parts, arguments.out, arguments.seconds, Log(file), look_at_machine())


class Log:
    """To the terminal and into a file. From any thread."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._lock = threading.Lock()

    def __call__(self, line: str) -> None:
        with self._lock:
            print(line, flush=True)
            self._file.write(line + "\n")
            self._file.flush()


def run_parts(parts: Sequence[Part], out: Path, seconds: float, log: Log, machine: Machine) -> int:
    """0: all passed."""
    began = time.monotonic()
    ends = began + seconds * machine.patience
    summary: dict[str, Any] = {**vars(machine), "parts": {}}
    log(
        f"on {machine.gpu}" if machine.gpu else "dry: there is no GPU, so Triton is interpreted and all sizes are small"
    )
    for part in parts:
        box_s, part_began = min(part.box_s * machine.patience, ends - time.monotonic()), time.monotonic()
        found: dict[str, Any] = {"part": part.name, "passed": False, "outcome": "not begun: no time is left"}
        if box_s > 5:
            log(f"── {part.name}: at most {box_s:.0f} s")
            found = run_part(part, box_s, log, machine)
        (out / f"{part.name}.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
        summary["parts"][part.name] = {
            "passed": found["passed"],
            "seconds": round(time.monotonic() - part_began, 1),
            "outcome": found["outcome"],
            "failed": [f"{c['name']}: {c.get('error', '')}" for c in found.get("checks", []) if not c["passed"]],
        }
    summary |= {"seconds": round(time.monotonic() - began, 1), "passed": passed(summary["parts"].values())}
    (out / "summary.json").write_text(json.dumps(summary) + "\n", encoding="utf-8")
    for name, entry in summary["parts"].items():
        log(f"{'passed' if entry['passed'] else 'FAILED'} {name:12} {entry['seconds']:6.1f} s  {entry['outcome']}")
        for line in entry["failed"]:
            log(f"       {line}")
    log(json.dumps(summary))
    return 0 if summary["passed"] else 1


def run_part(part: Part, box_s: float, log: Log, machine: Machine) -> dict[str, Any]:
    """All its processes, some at a time → what they found, as one."""
    commands = part.commands + part.ahead
    if not machine.gpu:  # the interpreter's product of bf16 is wrong, and there is nothing to compile for
        commands = tuple(command for command in part.commands if "bfloat16" not in command)
    ends = time.monotonic() + box_s
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(machine.at_once) as pool:
        results = [Path(folder) / f"{number}.json" for number in range(len(commands))]
        outcomes = list(
            pool.map(lambda command, result: run_command(command, result, ends, log, machine), commands, results)
        )
        found = [read(result) for result in results]
    merged: dict[str, Any] = {}
    for one in found:
        merged |= one
    wrong = [f"{' '.join(command)}: {outcome}" for command, outcome in zip(commands, outcomes, strict=True) if outcome]
    checks = [check for one in found for check in one.get("checks", [])]
    well = not wrong and passed(found) and passed(checks)
    outcome = "; ".join(wrong) or ("passed" if well else "checks failed")
    return {**merged, "part": part.name, "passed": well, "outcome": outcome, "checks": checks}


def run_command(command: Sequence[str], result: Path, ends: float, log: Log, machine: Machine) -> str:
    """→ what went wrong with the process; empty: it ended well. Its own processes are gone when this returns."""
    box_s = ends - time.monotonic()
    if box_s < 4:
        return "not begun: no time is left"
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4" if machine.gpu else "1")}
    if not machine.gpu:
        environment["TRITON_INTERPRET"] = "1"
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", *command, "--out", str(result), "--seconds", f"{box_s - 3:.0f}"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    copying = threading.Thread(target=copy_lines, args=(process.stdout, log))
    copying.start()
    try:
        code = process.wait(timeout=box_s)
    except subprocess.TimeoutExpired:
        return f"ended after {box_s:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its own session: an engine's processes are in it
        process.wait()
        copying.join(timeout=10)
    if code < 0:
        return f"ended by signal {signal.Signals(-code).name}"
    return "" if code == 0 or read(result).get("passed") is False else f"exit code {code}"


def copy_lines(stream: IO[str] | None, log: Log) -> None:
    """What a process prints, as it comes."""
    assert stream is not None
    with stream:
        for line in stream:
            log(line.rstrip("\n"))


def read(path: Path) -> dict[str, Any]:
    """The JSON that a process left; where it left none, that is no success."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {"passed": False}
    return found if isinstance(found, dict) else {"passed": False}


def passed(entries: Any) -> bool:
    """Whether there are some, and all have."""
    values = [entry["passed"] for entry in entries]
    return bool(values) and all(value is True for value in values)


def look_at_machine() -> Machine:
    """Asked in a process of its own: this one stays light."""
    code = (
        "import platform, torch, triton; gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ''; "
        "print('\\n'.join(('machine', gpu, platform.python_version(), torch.__version__, triton.__version__)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"torch and triton are needed here: {done.stderr.strip()[-500:]}")
    return Machine(*done.stdout.rstrip("\n").split("machine\n", 1)[1].split("\n"))


if __name__ == "__main__":
    sys.exit(main())
