"""What the ranks of a machine pay for a sum: shared memory beside gloo.

    python -m load.bench.exchange                       (two ranks, half a minute)
    python -m load.bench.exchange --ranks 3 --rows 1 32

Each rank is a process with one thread. First both groups are compared with the sum that one process takes. Then they
take turns, round by round: the median of the rounds of a call's mean, in microseconds, as rank 0 sees it. One JSON line
last.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from load.bench.regime import regime
from minisgl_backend.distributed.gloo import GlooGroup
from minisgl_backend.distributed.group import RankGroup
from minisgl_backend.distributed.seat import make_memory
from minisgl_backend.distributed.shared import SharedGroup
from minisgl_backend.kernels.native.library import open_library
from minisgl_backend.models.locate import cache_folder

_HIDDEN = (576, 4096)
_CALLS = 200  # of a round; fewer of large ones
_ROUND_BYTES = 8 << 20


@dataclass(frozen=True)
class Timed:
    """One size. Microseconds a call."""

    rows: int
    hidden: int
    shared_us: float
    gloo_us: float


def main() -> None:
    """Starts the other ranks, or is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 512])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)  # of a process that this one starts
    parser.add_argument("--memory", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory >= 0:
        _measure(options)
        return
    memory = make_memory(options.ranks)
    with tempfile.TemporaryDirectory() as folder:
        options.memory, options.meeting = memory, Path(folder) / "meeting"
        others = [_start(options, rank) for rank in range(1, options.ranks)]
        try:
            timed = _measure(options)
            failed = [code for other in others if (code := other.wait(timeout=60))]
        finally:
            for other in others:
                other.kill()
                other.wait()
    os.close(memory)
    if failed:
        sys.exit(f"a rank ended with code {failed[0]}")
    print(
        json.dumps({"bench": "exchange", "ranks": options.ranks, **regime(), "sizes": [asdict(one) for one in timed]})
    )


def _start(options: argparse.Namespace, rank: int) -> subprocess.Popen[bytes]:
    numbers = ["--rows", *map(str, options.rows), "--rounds", str(options.rounds), "--ranks", str(options.ranks)]
    place = ["--rank", str(rank), "--memory", str(options.memory), "--meeting", str(options.meeting)]
    return subprocess.Popen([sys.executable, "-m", "load.bench.exchange", *numbers, *place], pass_fds=(options.memory,))


def _measure(options: argparse.Namespace) -> list[Timed]:
    torch.set_num_threads(1)
    library = open_library(cache_folder())
    assert library is not None, "there are no kernels of our own here"
    groups: dict[str, RankGroup] = {
        "shared": SharedGroup(library, options.rank, options.ranks, options.memory),
        "gloo": GlooGroup(options.rank, options.ranks, options.meeting),
    }
    timed = []
    for hidden in _HIDDEN:
        for rows in options.rows:
            _check(groups, options.rank, options.ranks, rows, hidden)
            us = _times(groups, rows, hidden, options.rounds)
            timed.append(Timed(rows, hidden, us["shared"], us["gloo"]))
            if options.rank == 0:
                ratio = us["gloo"] / us["shared"]
                print(
                    f"{rows:4} × {hidden}: shared {us['shared']:8.1f} µs, gloo {us['gloo']:8.1f} µs, {ratio:.1f} times",
                    flush=True,
                )
    return timed


def _check(groups: dict[str, RankGroup], rank: int, ranks: int, rows: int, hidden: int) -> None:
    parts = [torch.randn(rows, hidden, generator=torch.Generator().manual_seed(at)) for at in range(ranks)]
    expected = torch.stack(parts).sum(0)
    for group in groups.values():
        torch.testing.assert_close(group.add_up(parts[rank].clone()), expected)


def _times(groups: dict[str, RankGroup], rows: int, hidden: int, rounds: int) -> dict[str, float]:
    x = torch.zeros(rows, hidden, dtype=torch.bfloat16)
    calls = max(10, min(_CALLS, _ROUND_BYTES // x.nbytes))
    seen: dict[str, list[float]] = {name: [] for name in groups}
    for _ in range(rounds):
        for name, group in groups.items():
            group.add_up(x)  # all begin together
            began = time.perf_counter()
            for _ in range(calls):
                group.add_up(x)
            seen[name].append((time.perf_counter() - began) / calls * 1e6)
    return {name: round(statistics.median(times), 1) for name, times in seen.items()}


if __name__ == "__main__":
    main()
