"""Native products beside torch's and oneDNN's, and beside what the machine gives at most.

    python -m load.bench.kernels                             (SmolLM2's shapes in bf16, about a minute)
    python -m load.bench.kernels --dtype float32 --rows 1 32 --shapes 576x3072

First every product is compared with torch. Then each is timed over weights that are used in turn, together larger than
any cache share, as a step uses a model's: call by call, the median of `--repeats` rounds taken in turn. Two ceilings
take their turn too, since a shared machine changes its pace: how fast torch reads 16 MiB, and its rate in a product of
1,024² matrices. oneDNN's product is the one that torch prepacks (inference mode, bf16 only). One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from load.bench.ceiling import Clock
from load.bench.regime import regime
from minisgl_backend.device.machine import default_threads
from minisgl_backend.kernels.native.library import Library, open_library
from minisgl_backend.kernels.native.packed import pack, packed_shape
from minisgl_backend.models.locate import cache_folder

SHAPES = ("576x960", "576x576", "576x3072", "1536x576", "576x49152")
ROWS = (1, 4, 8, 16, 32, 128, 512)

_ROUND_S = 0.02  # that a round of one product aims at
_MOST_WEIGHTS = 1000
_READ_BYTES = 16 << 20
_SIDE = 1024

_Cases = dict[str, tuple[Callable[[Tensor], Tensor], Sequence[Tensor]]]  # a product, and the weights that it takes


@dataclass(frozen=True)
class Timed:
    """One product. Microseconds a call; a peer that is not there is None."""

    depth: int
    outputs: int
    rows: int
    native_us: float
    linear_us: float
    onednn_us: float | None
    weights_gb_s: float  # of the native one
    gflop_s: float
    ceiling_gb_s: float
    ceiling_gflop_s: float
    of_ceiling: float  # share: the longer of what reading and computing take at the ceilings, by the native one's time


def main() -> int:
    """Measures, prints a table and the JSON line."""
    arguments = _parser().parse_args()
    library = open_library(cache_folder(), lambda line: print(line, file=sys.stderr))
    if library is None:
        return 1
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    rows = []
    with torch.inference_mode():
        ceilings = ceiling_cases(dtype)
        for shape in arguments.shapes:
            depth, outputs = (int(side) for side in shape.split("x"))
            weights = Weights.drawn(depth, outputs, dtype, arguments.mib << 20)
            for count in arguments.rows:
                timed = measure(library, weights, count, arguments.repeats, ceilings)
                print(_line(timed), flush=True)
                rows.append(asdict(timed))
    said = {"bench": "kernels", **regime(), "torch": torch.__version__, "level": library.level.name, **vars(arguments)}
    print(json.dumps({**said, "products": rows}))
    return 0


def ceiling_cases(dtype: torch.dtype) -> _Cases:
    """What is timed beside every product."""
    vector, square = torch.ones(4096), torch.ones(_SIDE, _SIDE, dtype=dtype)
    matrices = [torch.ones(_READ_BYTES // 4 // 4096, 4096) for _ in range(24)]
    return {
        "read": (lambda matrix: torch.mv(matrix, vector), matrices),
        "matrix": (lambda matrix: torch.mm(matrix, matrix), [square]),
    }


@dataclass(frozen=True)
class Weights:
    """Many of one shape [outputs, depth], plain and packed."""

    plain: Sequence[Tensor]
    packed: Sequence[Tensor]

    @staticmethod
    def drawn(depth: int, outputs: int, dtype: torch.dtype, size_bytes: int) -> Weights:
        """size_bytes: of them all, more or less."""
        count = max(2, min(size_bytes // (depth * outputs * dtype.itemsize), _MOST_WEIGHTS))
        plain = [torch.randn(outputs, depth).to(dtype) for _ in range(count)]
        packed = [torch.empty(packed_shape(outputs, depth, dtype), dtype=dtype) for _ in plain]
        for weight, into in zip(plain, packed, strict=True):
            pack(weight, into)
        return Weights(plain, packed)


def measure(library: Library, weights: Weights, rows: int, repeats: int, ceilings: _Cases) -> Timed:
    """One number of rows."""
    outputs, depth = weights.plain[0].shape
    seconds = _in_turn({**_cases(library, weights, rows), **ceilings}, repeats)
    native, onednn = seconds["native"], seconds.get("onednn")
    weight_bytes, operations = weights.plain[0].nbytes, 2 * rows * depth * outputs
    read, computed = _READ_BYTES / seconds["read"] / 1e9, 2 * _SIDE**3 / seconds["matrix"] / 1e9
    return Timed(
        depth,
        outputs,
        rows,
        round(native * 1e6, 1),
        round(seconds["linear"] * 1e6, 1),
        None if onednn is None else round(onednn * 1e6, 1),
        round(weight_bytes / native / 1e9, 1),
        round(operations / native / 1e9),
        round(read, 1),
        round(computed),
        round(max(weight_bytes / read, operations / computed) / 1e9 / native, 2),
    )


def _cases(library: Library, weights: Weights, rows: int) -> _Cases:
    """What is timed. Compares ours with torch's first."""
    outputs, depth = weights.plain[0].shape
    x = torch.randn(rows, depth).to(weights.plain[0].dtype)
    native = library.ops.linear
    _check(native(x, weights.packed[0], None, outputs), x, weights.plain[0])
    cases: _Cases = {
        "native": (lambda weight: native(x, weight, None, outputs), weights.packed),
        "linear": (lambda weight: F.linear(x, weight), weights.plain),
    }
    if x.dtype == torch.bfloat16:
        onednn = torch.ops.mkldnn
        prepacked = [onednn._reorder_linear_weight(weight, rows) for weight in weights.plain]
        cases["onednn"] = (lambda weight: onednn._linear_pointwise(x, weight, None, "none", [], ""), prepacked)
    return cases


def _in_turn(cases: _Cases, repeats: int, clock: Clock = time.perf_counter) -> dict[str, float]:
    """Seconds a call of each: the median of rounds, whose time is the median of their calls."""
    at = dict.fromkeys(cases, 0)
    rounds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, (call, weights) in cases.items():
            times: list[float] = []
            while sum(times) < _ROUND_S or len(times) < 3:
                weight = weights[at[name] % len(weights)]
                at[name] += 1
                times.append(_seconds(lambda: call(weight), clock))  # noqa: B023
            rounds[name].append(statistics.median(times))
    return {name: statistics.median(times) for name, times in rounds.items()}


def _seconds(call: Callable[[], Tensor], clock: Clock) -> float:
    began = clock()
    call()
    return clock() - began


def _check(got: Tensor, x: Tensor, weight: Tensor) -> None:
    exact = F.linear(x.float(), weight.float())
    off = (got.float() - exact).abs().max().item()
    most = (2**-7 if x.dtype == torch.bfloat16 else 1e-4) * exact.abs().max().item()
    assert off <= most, f"{tuple(x.shape)} by {tuple(weight.shape)}: off by {off}, {most} is allowed"


def _line(timed: Timed) -> str:
    peers = f"torch {timed.linear_us:.0f}"
    if timed.onednn_us is not None:
        peers += f", oneDNN prepacked {timed.onednn_us:.0f}"
    return (
        f"{timed.depth}x{timed.outputs}, {timed.rows} rows: {timed.native_us:.0f} µs ({peers}); "
        f"{timed.weights_gb_s:.1f} of {timed.ceiling_gb_s:.1f} GB/s, "
        f"{timed.gflop_s:.0f} of {timed.ceiling_gflop_s:.0f} GFLOP/s: {timed.of_ceiling:.0%}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="DEPTHxOUTPUTS")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--mib", type=int, default=384, help="of weights of one shape that are used in turn")
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
