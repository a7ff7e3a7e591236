"""Runs the parts of the proof one after another, each in a process and a time box of its own: see README.md.

    python proof.py OUT_FOLDER [--only PART …] [--seconds 480]

A part that fails, hangs or crashes costs its own result. OUT_FOLDER then holds a JSON file for each part, summary.json,
and run.log with all that the parts printed: 8 files, as many as come back from the machine at once. The exit code is 0
if all parts passed. Loads nothing but the standard library.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Part:
    """One process. box_s: it is ended after that."""

    name: str
    module: str
    box_s: float
    arguments: tuple[str, ...] = ()


PARTS = (
    Part("numerics", "tests.gpu.parts", 110, ("numerics",)),
    Part("graphs", "tests.gpu.parts", 60, ("graphs",)),
    Part("overlap", "tests.gpu.parts", 80, ("overlap",)),
    Part("kernels", "load.bench.kernels_gpu", 60),
    Part("steps", "load.bench.step_gpu", 110),
    Part("flashinfer", "tests.gpu.parts", 60, ("flashinfer",)),
)
"""In this order: a wrong number first, then what depends on it; what may be missing last."""


def main(given: Sequence[str] | None = None) -> int:
    """Runs them, prints and writes the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], default=[])
    parser.add_argument("--seconds", type=float, default=480.0, help="for all parts together")
    arguments = parser.parse_args(given)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / "run.log").open("w", encoding="utf-8", errors="replace") as log:
        return run_parts(
            [part for part in PARTS if not arguments.only or part.name in arguments.only],
            arguments.out,
            arguments.seconds,
            log,
        )


def run_parts(parts: Sequence[Part], out: Path, seconds: float, log: IO[str]) -> int:
    """0: all passed."""
    ends, gpu = time.monotonic() + seconds, gpu_name()
    environment = dict(os.environ)
    if not gpu:
        environment["TRITON_INTERPRET"] = "1"
    say(log, f"{'on ' + gpu if gpu else 'dry: there is no GPU here, so Triton is interpreted and the sizes are small'}")
    summary: dict[str, Any] = {"gpu": gpu, "parts": {}}
    for part in parts:
        box_s = min(part.box_s, ends - time.monotonic())
        began = time.monotonic()
        if box_s < 5:
            outcome = "not begun: no time is left"
        else:
            say(log, f"── {part.name}: at most {box_s:.0f} s")
            outcome = run_part(part, out / f"{part.name}.json", box_s, environment, log)
        found = read(out / f"{part.name}.json")
        passed = outcome == "" and found.get("passed") is True
        summary["parts"][part.name] = {
            "passed": passed,
            "seconds": round(time.monotonic() - began, 1),
            "outcome": outcome or ("passed" if passed else "checks failed"),
            "failed": [f"{c['name']}: {c.get('error', '')}" for c in found.get("checks", []) if not c["passed"]],
        }
    summary["passed"] = bool(parts) and all(entry["passed"] for entry in summary["parts"].values())
    (out / "summary.json").write_text(json.dumps(summary) + "\n", encoding="utf-8")
    for name, entry in summary["parts"].items():
        say(log, f"{'passed' if entry['passed'] else 'FAILED'} {name:12} {entry['seconds']:6.1f} s  {entry['outcome']}")
        for line in entry["failed"]:
            say(log, f"       {line}")
    say(log, json.dumps(summary))
    return 0 if summary["passed"] else 1


def run_part(part: Part, result: Path, box_s: float, environment: Mapping[str, str], log: IO[str]) -> str:
    """→ what went wrong with the process; empty: it ended well. Its processes are gone when this returns."""
    result.unlink(missing_ok=True)
    command = [sys.executable, "-u", "-m", part.module, *part.arguments, "--out", str(result)]
    command += ["--seconds", f"{box_s - 4:.0f}"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=dict(environment),
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
        return f"ended after its {box_s:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its own session: an engine's processes are in it
        process.wait()
        copying.join(timeout=10)
    if code < 0:
        return f"ended by signal {signal.Signals(-code).name}"
    return "" if code == 0 or read(result).get("passed") is False else f"exit code {code}"


def copy_lines(stream: IO[str] | None, log: IO[str]) -> None:
    """What the part prints, as it comes."""
    assert stream is not None
    with stream:
        for line in stream:
            print(line, end="", flush=True)
            log.write(line)
            log.flush()


def read(path: Path) -> dict[str, Any]:
    """A part's JSON; empty where it left none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def gpu_name() -> str:
    """As torch tells it, in a process of its own; empty: there is none."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 and done.stdout.strip() else ""


def say(log: IO[str], line: str) -> None:
    print(line, flush=True)
    log.write(line + "\n")
    log.flush()


if __name__ == "__main__":
    sys.exit(main())
