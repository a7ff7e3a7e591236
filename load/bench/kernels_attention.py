"""Attention alone: one layer's, native and torch, beside the time that reading its keys and values takes.

    python -m load.bench.kernels_attention            (about a minute)
    python -m load.bench.kernels_attention --quick    (the same in small: a smoke test, not a measurement)

Correctness first: both backends must come to the same numbers. Then each case goes over as many layers as a model has,
each with keys and values of its own, so that a step's working set is that of a model and not of a cache; native and
torch take turns, and the median of the rounds counts. The floor is the bytes of keys and values over the fastest of
five reads of as many bytes by the same threads. Prompts have no such floor; their time is given per layer. One JSON
line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from tqdm import tqdm

from load.bench.regime import regime
from minisgl_backend.attention.interface import AttentionBackend, AttentionVariant, StepAttention, StepRows
from minisgl_backend.attention.native_backend import NativeAttention
from minisgl_backend.attention.torch_backend import TorchAttention
from minisgl_backend.device.machine import default_threads
from minisgl_backend.kernels.native.library import Library, open_library
from minisgl_backend.kvpool.paged import KvShape, PagedKvPool
from minisgl_backend.models.locate import cache_folder

_TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
_PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a model's attention."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    layers: int


@dataclass(frozen=True, slots=True)
class Case:
    """Rows that are all alike."""

    name: str
    rows: int
    start: int  # tokens that a row has already
    length: int  # tokens that it computes


SHAPES = (Shape("smollm2-135m", 9, 3, 64, 30), Shape("llama-8b", 32, 8, 128, 4))
CASES = (
    Case("decode 1 x 512", 1, 511, 1),
    Case("decode 8 x 512", 8, 511, 1),
    Case("decode 32 x 512", 32, 511, 1),
    Case("decode 32 x 2048", 32, 2047, 1),
    Case("chunk 512", 1, 0, 512),
    Case("chunk 512 after 512", 1, 512, 512),
)


def main() -> None:
    """Measures every case with every shape."""
    arguments = _parser().parse_args()
    threads = arguments.threads or default_threads()
    torch.set_num_threads(threads)
    library = open_library(cache_folder(), print)
    if library is None:
        raise SystemExit("there are no native kernels here")
    dtype = torch.float32 if arguments.dtype == "fp32" else torch.bfloat16
    shapes = [replace(shape, layers=2) if arguments.quick else shape for shape in SHAPES]
    rows = []
    print(f"{'':34}{'native ms':>10}{'torch ms':>10}{'ratio':>8}{'floor ms':>10}{'native / floor':>16}   a layer")
    for shape in shapes:
        for case in tqdm(CASES, leave=False, disable=None):
            row = measure(shape, case, dtype, library, 1 if arguments.quick else arguments.rounds)
            tqdm.write(_line(row))
            rows.append(row)
    settings = {"threads": threads, "level": library.level.name, **vars(arguments)}
    print(json.dumps({"bench": "kernels_attention", **regime(), "torch": torch.__version__, **settings, "rows": rows}))


@torch.inference_mode()
def measure(shape: Shape, case: Case, dtype: torch.dtype, library: Library, rounds: int) -> dict[str, object]:
    """Times of one layer in milliseconds; and that the two backends agree."""
    step, pool = _step(shape, case, dtype)
    variants = [AttentionVariant(shape.head_dim**-0.5)] * shape.layers
    native, torch_own = NativeAttention(pool, variants, library), TorchAttention(pool, variants)
    tokens = case.rows * case.length
    q = torch.randn(tokens, shape.heads, shape.head_dim).to(dtype)
    k, v = (torch.randn(tokens, shape.kv_heads, shape.head_dim).to(dtype) for _ in range(2))

    def attend(attention: StepAttention, layer: int) -> torch.Tensor:
        return attention.attend(layer, q, k, v)

    backends: dict[str, AttentionBackend] = {"native": native, "torch": torch_own}
    given, expected = (attend(backend.begin(step), 0) for backend in backends.values())
    torch.testing.assert_close(given, expected, atol=_TOLERANCE[dtype], rtol=0)

    times: dict[str, list[float]] = {name: [] for name in backends}
    for _ in range(rounds):
        for name, backend in backends.items():
            begun = backend.begin(step)
            began = time.perf_counter()
            for layer in range(shape.layers):
                attend(begun, layer)
            times[name].append((time.perf_counter() - began) / shape.layers * 1e3)
    ms = {name: statistics.median(each) for name, each in times.items()}
    row: dict[str, object] = {
        "shape": shape.name,
        **asdict(case),
        "native_ms": round(ms["native"], 4),
        "torch_ms": round(ms["torch"], 4),
        "ratio": round(ms["torch"] / ms["native"], 2),
    }
    if case.length == 1:
        read_bytes = 2 * case.rows * (case.start + 1) * shape.kv_heads * shape.head_dim * dtype.itemsize
        floor = read_s(read_bytes * shape.layers, dtype) / shape.layers * 1e3
        row.update(floor_ms=round(floor, 4), of_floor=round(ms["native"] / floor, 2))
    return row


def read_s(read_bytes: int, dtype: torch.dtype, clock: Callable[[], float] = time.perf_counter) -> float:
    """The fastest of five reads of as many bytes as a step's, by torch's threads."""
    words = torch.zeros(read_bytes // 8, dtype=torch.int64)
    best = float("inf")
    for _ in range(6):  # the first one takes the memory
        began = clock()
        words.sum()
        best = min(best, clock() - began)
    return best


def _step(shape: Shape, case: Case, dtype: torch.dtype) -> tuple[StepRows, PagedKvPool]:
    """Rows whose pages lie in any order, and a pool that is full."""
    end = case.start + case.length
    pages = -(-end // _PAGE_TOKENS)
    kind = KvShape(shape.layers, shape.kv_heads, shape.head_dim, dtype)
    pool = PagedKvPool(kind, case.rows * pages, _PAGE_TOKENS, torch.device("cpu"))
    numbers = torch.randn(pool.layer(0)[0].shape).to(dtype)
    for layer in range(shape.layers):
        for store in pool.layer(layer):
            store.copy_(numbers)
    order = torch.randperm(case.rows * pages, generator=torch.Generator().manual_seed(1))
    starts, lengths = np.full(case.rows, case.start, np.int64), np.full(case.rows, case.length, np.int64)
    return StepRows(starts, lengths, order.view(case.rows, pages)), pool


def _line(row: dict[str, object]) -> str:
    line = f"{row['shape']!s:14}{row['name']!s:20}{row['native_ms']:>10}{row['torch_ms']:>10}{row['ratio']:>8}"
    return line + (f"{row['floor_ms']:>10}{row['of_floor']:>16}" if "floor_ms" in row else "")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as a worker has")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true")
    return parser


if __name__ == "__main__":
    main()
