"""Our GPU kernels one by one, beside what the machine gives: bytes over the copy's rate, operations over a product's.

    python -m load.bench.kernels_gpu [--out FILE.json] [--only NAME] [--rounds 20]

Both ceilings are measured first, on the spot. Then each case: its numbers are compared with those of the torch
reference on the same inputs, and only then it is timed (gpu_clock.py), beside torch where one operator or a few do the
same. The floor of a case is the larger of bytes / copy rate and operations / product rate; bytes are those that must be
touched once.
Without a GPU it runs dry, in Triton's interpreter on the smallest sizes. One JSON line last, also in the file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from load.bench.gpu_clock import GpuClock, errors
from load.bench.kernels_gpu_cases import Case, all_cases
from load.bench.regime import regime


@dataclass(frozen=True)
class Ceilings:
    """Of this GPU, as measured."""

    bytes_per_s: float
    operations_per_s: float

    def floor_ms(self, case: Case) -> float:
        return 1e3 * max(case.touched_bytes / self.bytes_per_s, case.operations / self.operations_per_s)


def main(given: Sequence[str] | None = None) -> int:
    """0: every case agrees with its reference."""
    arguments = parse_arguments(given)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock = GpuClock(device, arguments.rounds)
    ends = time.monotonic() + arguments.seconds
    dtype = torch.bfloat16 if clock.on_gpu else torch.float16  # the interpreter's product of bf16 is wrong
    with torch.inference_mode():
        ceilings = None if arguments.check_only else measure_ceilings(clock, dtype)
        found: dict[str, Any] = {
            "part": "kernels",
            **regime(),
            "device": torch.cuda.get_device_name() if clock.on_gpu else "cpu, interpreted: no measurement",
            "torch": torch.__version__,
            "dtype": str(dtype),
            "checks": [],
        }
        if ceilings is not None:
            found["copy_tb_s"] = round(ceilings.bytes_per_s / 1e12, 4)
            found["product_tflop_s"] = round(ceilings.operations_per_s / 1e12, 2)
        shard, shards = arguments.shard
        chosen = [make for make in all_cases(device, dtype) if arguments.only in make.name][shard::shards]
        for make in chosen:
            found["checks"].append(row_of(make.name, make.make, clock, ceilings, ends))
            write(found, arguments.out)
    write(found, arguments.out)
    print(json.dumps(found))
    return 0 if found["passed"] else 1


def measure_ceilings(clock: GpuClock, dtype: torch.dtype) -> Ceilings:
    """And the head of the table."""
    ceilings = Ceilings(clock.copy_bytes_per_s(), clock.operations_per_s(dtype))
    print(
        f"copy {ceilings.bytes_per_s / 1e12:.3f} TB/s (read and written), "
        f"products {ceilings.operations_per_s / 1e12:.1f} TFLOP/s in {dtype}"
    )
    print(f"{'':44}{'ms':>9}{'floor':>9}{'ratio':>7}{'TB/s':>7}{'TFLOP/s':>9}{'torch ms':>10}")
    return ceilings


def row_of(
    name: str, make: Callable[[], Case], clock: GpuClock, ceilings: Ceilings | None, ends: float
) -> dict[str, Any]:
    """One case; what goes wrong with it is told and costs no other."""
    row: dict[str, Any] = {"name": name, "passed": False}
    try:
        if time.monotonic() > ends:
            raise TimeoutError("not begun: the time is over")
        row |= measure(make(), clock, ceilings)
        row["passed"] = True
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:1500]
    print(line_of(row), flush=True)
    if clock.on_gpu:
        torch.cuda.empty_cache()
    return row


def measure(case: Case, clock: GpuClock, ceilings: Ceilings | None) -> dict[str, Any]:
    """Correctness, then time; without ceilings correctness alone."""
    rms, most = errors(case.work(), case.reference())
    if not (rms <= case.tolerance and most <= 20 * case.tolerance):
        raise AssertionError(f"wrong numbers: rms {rms:.3g}, largest {most:.3g}, allowed {case.tolerance} and 20 of it")
    if ceilings is None:
        return {"rms": float(f"{rms:.3g}")}
    ms = clock.median_ms(case.work)
    floor = ceilings.floor_ms(case)
    row: dict[str, Any] = {
        "rms": float(f"{rms:.3g}"),
        "ms": round(ms, 5),
        "floor_ms": round(floor, 5),
        "of_floor": round(ms / floor, 2),
        "tb_s": round(case.touched_bytes / ms / 1e9, 4),
        "tflop_s": round(case.operations / ms / 1e9, 3),
    }
    if case.peer is not None:
        row["torch_ms"] = round(clock.median_ms(case.peer, captured=not case.peer_waits), 5)
    return row


def line_of(row: dict[str, Any]) -> str:
    """For people who watch."""
    if "error" in row:
        return f"{row['name']:44}FAILED {row['error']}"
    if "ms" not in row:
        return f"{row['name']:44}ok, rms {row['rms']}"
    columns = [f"{row[key]:>{width}}" for key, width in (("ms", 9), ("floor_ms", 9), ("of_floor", 7), ("tb_s", 7))]
    return f"{row['name']:44}{''.join(columns)}{row['tflop_s']:>9}{row.get('torch_ms', '–'):>10}"


def write(found: dict[str, Any], out: Path | None) -> None:
    """The file of the proof's part."""
    found["passed"] = bool(found["checks"]) and all(row["passed"] for row in found["checks"])
    if out is not None:
        out.write_text(json.dumps(found) + "\n", encoding="utf-8")


def parse_arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="cases whose name contains it")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=600.0, help="cases that begin later are left out, and fail")
    parser.add_argument("--check-only", action="store_true", help="numbers, no times: may run beside others")
    parser.add_argument("--shard", type=shard_of, default=(0, 1), help="1/4: the second of four parts of the cases")
    return parser.parse_args(given)


def shard_of(text: str) -> tuple[int, int]:
    """Of the command line."""
    index, count = map(int, text.split("/"))
    if not 0 <= index < count:
        raise ValueError(text)
    return index, count


if __name__ == "__main__":
    sys.exit(main())
