"""What this machine gives at most: how fast weights are read, and how many operations a product makes a second.

    python -m load.bench.ceiling            (some seconds)

A decode step of one row reads every weight once: it takes no less than their bytes over the first number. A step of
many rows takes no less than twice weights times rows over the second. Both by torch in fp32 on operands far larger
than any cache, best of several, with the threads a worker has by default and with all cores. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable

import torch

from load.bench.regime import regime
from minisgl_backend.device.machine import default_threads

Clock = Callable[[], float]  # seconds


def main() -> None:
    """Measures both with each number of threads."""
    arguments = _parser().parse_args()
    rows = []
    for threads in sorted({default_threads(), len(os.sched_getaffinity(0))}):
        torch.set_num_threads(threads)
        read = read_gb_s(arguments.mib << 20, arguments.repeats)
        computed = product_gflop_s(arguments.side, arguments.repeats)
        print(f"threads {threads}: weights read at {read:.1f} GB/s, products at {computed:.0f} GFLOP/s")
        rows.append({"threads": threads, "read_gb_s": round(read, 1), "gflop_s": round(computed, 1)})
    print(json.dumps({"bench": "ceiling", **regime(), "torch": torch.__version__, **vars(arguments), "rows": rows}))


def read_gb_s(matrix_bytes: int, repeats: int, clock: Clock = time.perf_counter) -> float:
    """A matrix times a vector: each element is read once and used once."""
    matrix = torch.ones(matrix_bytes // 4 // 4096, 4096)
    vector = torch.ones(4096)
    return matrix.numel() * 4 / _best_s(lambda: torch.mv(matrix, vector), repeats, clock) / 1e9


def product_gflop_s(side: int, repeats: int, clock: Clock = time.perf_counter) -> float:
    """Two square matrices."""
    left, right = torch.ones(side, side), torch.ones(side, side)
    return 2 * side**3 / _best_s(lambda: torch.mm(left, right), repeats, clock) / 1e9


def _best_s(work: Callable[[], torch.Tensor], repeats: int, clock: Clock) -> float:
    work()  # the first one also takes memory and wakes threads
    times = []
    for _ in range(repeats):
        began = clock()
        work()
        times.append(clock() - began)
    return min(times)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="of the matrix that is read")
    parser.add_argument("--side", type=int, default=2048, help="of the matrices that are multiplied")
    parser.add_argument("--repeats", type=int, default=7)
    return parser


if __name__ == "__main__":
    main()
