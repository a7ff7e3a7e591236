"""Where the time of a start goes: from the command `minisgl serve` until it says `ready`, with less and more to find.

    python -m load.bench.start            (SmolLM2: three starts a round, under a minute on an idle machine)

    first    as after a boot: the files of Python, its packages, the server and the model are not in memory. They were
             dropped from the page cache; what another process maps stays, so `MiB read` tells how cold it was
    second   the files are there, and nothing else: the server was stopped, and its engine with it
    warm     the server was killed; its engine, which outlives it by its lease, is found

Not a part of it: what only the very first start on a machine does, fetch and convert the model. The stages are those
that `minisgl serve` prints, in seconds; one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from load.bench.regime import regime
from load.serving import PATIENCE_S, eventually, serving
from minisgl_backend.actors.launch import find
from minisgl_backend.models.locate import locate_model

_ROOT = Path(__file__).resolve().parents[2]
_LEASE_S = 60  # of the engine that the warm start is to find
_ENDS_S = 30.0


@dataclass(frozen=True)
class Start:
    """One start, seconds."""

    name: str
    ready_s: float  # as `minisgl serve` says it
    stages: Mapping[str, float]  # of the command: `start` is tritonserver
    engine: Mapping[str, float]  # of the engine, beside it; empty where it was there already
    read_mib: float  # from the disk, by the whole machine


def main() -> None:
    """Runs the rounds of the command line."""
    arguments = _parser().parse_args()
    files = (Path(sys.prefix), Path(sys.base_prefix), _ROOT / "minisgl_backend", locate_model(arguments.model))
    options = ("--model", arguments.model, "--dtype", arguments.dtype)
    starts = []
    for _ in range(arguments.repeats):
        for start in measure(options, lambda: drop(files)):
            starts.append(start)
            print(row(start), flush=True)
    print(json.dumps({"bench": "start", **regime(), **vars(arguments), "starts": [asdict(start) for start in starts]}))


def measure(options: Sequence[str], make_cold: Callable[[], None], **settings: Any) -> list[Start]:
    """A round: first, second, warm. options, settings: of `minisgl serve`."""
    runtime = Path(tempfile.mkdtemp(prefix="msg-"))
    try:
        make_cold()
        first, _ = _start("first", runtime, options, settings)
        second, engine = _start("second", runtime, options, settings, kill=True)
        warm, found = _start("warm", runtime, options, settings)
        assert found == engine, "the engine of the killed server was not found"
        return [first, second, replace(warm, engine={})]  # it says again where the time of its own start went
    finally:
        shutil.rmtree(runtime, ignore_errors=True)


def drop(roots: Iterable[Path]) -> None:
    """Takes the files below `roots` out of the page cache, as far as nobody maps them or has yet to write them."""
    os.sync()
    for root in roots:
        for folder, _, names in os.walk(root):
            for name in names:
                _drop_file(f"{folder}/{name}")


def row(start: Start) -> str:
    """A line for people."""
    stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in start.stages.items())
    engine = ", ".join(f"{name} {seconds:.1f}" for name, seconds in start.engine.items()) or "was there"
    return f"{start.name:7} {start.ready_s:5.1f} s ({stages}); engine: {engine}; {start.read_mib:.0f} MiB read"


def stages_of(lines: Sequence[str], words: str) -> tuple[float, dict[str, float]]:
    """Of the last line with `words SECONDS s (STAGE SECONDS, …)`: the seconds in all, and of each stage. 0: no such."""
    for line in reversed(lines):
        if found := re.search(words + r" ([0-9.]+) s \(([^()]*)\)", line):
            parts = (part.rsplit(" ", 1) for part in found[2].split(", "))
            return float(found[1]), {stage: float(seconds) for stage, seconds in parts}
    return 0.0, {}


def _start(
    name: str, runtime: Path, options: Sequence[str], settings: Mapping[str, Any], *, kill: bool = False
) -> tuple[Start, int]:
    """Starts a server and ends it: as an operator, or with SIGKILL, which leaves its engine. Also the engine's pid."""
    before_kib = _read_kib()
    with serving(*options, runtime=runtime, lease_s=_LEASE_S, **settings) as server:
        read_kib = _read_kib() - before_kib
        ready_s, stages = stages_of(server.lines, "ready after")
        engine = eventually(  # its line takes another way than the server's being ready
            lambda: stages_of(server.lines, "started in")[1], PATIENCE_S, lambda: "\n".join(server.lines)
        )
        place = find(server.run_dir)
        assert place is not None, "no engine is there"
        if kill:
            others = psutil.Process(server.process.pid).children(recursive=True)
            server.process.kill()
            _, alive = psutil.wait_procs(others, _ENDS_S)
            assert not alive, f"they outlive their server: {alive}"
    return Start(name, ready_s, stages, engine, read_kib / 1024), place.pid


def _drop_file(path: str) -> None:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # a link, a socket, or gone
        return
    try:
        if stat.S_ISREG(os.fstat(file).st_mode):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


def _read_kib() -> int:
    """Read from disks since the machine started."""
    return int(re.search(r"^pgpgin (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)[1])  # type: ignore[index]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=1, help="rounds of three starts")
    return parser


if __name__ == "__main__":
    main()
