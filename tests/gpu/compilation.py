"""Compiles what our code launches to machine code of GPUs that are not here, and judges what the compiler reports.

    python -m tests.gpu.compilation                 each kernel once per architecture: its largest tiles
    python -m tests.gpu.compilation --all           every launch of every shape (make gpu-compile)
    python -m tests.gpu.compilation --kernel NAME   those whose name contains it
    python -m tests.gpu.compilation --list          what is launched, nothing compiled
    python -m tests.gpu.compilation --ahead         what the proof launches, for this GPU, into Triton's own cache

Launches are those of whole models over meta tensors (model_launches.py, launches.py). Each is compiled for A100, H100
or H200, and B200. Asked for (verdict.py): it compiles; hardly a register is spilled; it fits into the shared memory;
products of 16-bit numbers are matrix instructions, and wgmma on sm_90 where 64 rows or more are multiplied. The last
line is one JSON object; the exit code is 0 if nothing was found wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where nobody chooses; 3.6 knows no other

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from load.bench.kernels_gpu import shard_of

from .launches import Collection, Launch, collecting
from .model_launches import collect_ahead, collect_all
from .verdict import CAPABILITIES, MATRIX_INSTRUCTIONS, Compiled, fault_of, table

_DOT = re.compile(r"tt\.dot .*? : tensor<(\d+)x(\d+)x(\w+)> \* tensor<(\d+)x(\d+)x\w+>")


def compile_launch(launch: Launch, capability: int) -> Compiled:
    """To a cubin. Never raises: what the compiler refuses is a fault."""
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    log = io.StringIO()
    triton.knobs.nvidia.dump_ptxas_log = True
    try:
        with contextlib.redirect_stdout(log):
            made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    except Exception as error:  # it has no errors of its own kind
        text = f"{type(error).__name__}: {error}"[-2000:]
        return Compiled(launch.name, capability, str(launch), 0, 0, 0, 0, 0, (), (), text)
    report = log.getvalue()
    ptx = made.asm["ptx"]
    compiled = Compiled(
        kernel=launch.name,
        capability=capability,
        launch=str(launch),
        registers=_number(r"Used (\d+) registers", report),
        spill_bytes=_number(r"(\d+) bytes spill stores", report) + _number(r"(\d+) bytes spill loads", report),
        stack_bytes=_number(r"(\d+) bytes stack frame", report),
        shared_bytes=made.metadata.shared,
        warps=made.metadata.num_warps,
        instructions=tuple(name for name in MATRIX_INSTRUCTIONS if name in ptx),
        dots=tuple(sorted({(int(m), int(n), int(k), kind) for m, k, kind, _, n in _DOT.findall(made.asm["ttir"])})),
        fault="",
    )
    return replace(compiled, fault=fault_of(compiled))


def _number(pattern: str, report: str) -> int:
    found = re.findall(pattern, report)
    return int(found[-1]) if found else 0


def representatives(launches: Iterable[Launch]) -> list[Launch]:
    """Of each kernel the launch with the largest tiles, bf16 where it has that: what is most likely to go wrong."""
    best: dict[str, Launch] = {}
    for launch in launches:
        known = best.get(launch.name)
        if known is None or _weight(launch) > _weight(known):
            best[launch.name] = launch
    return list(best.values())


def _weight(launch: Launch) -> tuple[bool, int]:
    tile = 1
    for value in launch.named_constants.values():
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            tile *= value
    return "*bf16" in launch.signature.values(), tile


def compile_all(launches: Sequence[Launch], capabilities: Sequence[int], processes: int) -> list[Compiled]:
    """In as many processes, in a cache of their own, so that the compiler runs and reports."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        return _compile_queue([(launch, capability) for launch in launches for capability in capabilities], processes)


def _compile_queue(queue: list[tuple[Launch, int]], processes: int) -> list[Compiled]:
    global _queue
    _queue = queue
    with multiprocessing.get_context("fork").Pool(processes) as pool:  # fork: kernels can not be pickled
        made = []
        for compiled in pool.imap(_compile_at, range(len(queue))):
            made.append(compiled)
            if sys.stderr.isatty() or len(made) % 100 == 0:
                print(f"{len(made)} of {len(queue)}", file=sys.stderr, flush=True)
        return made


_queue: list[tuple[Launch, int]] = []


def _compile_at(place: int) -> Compiled:
    return compile_launch(*_queue[place])


def main(given: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(given)
    torch.set_num_threads(1)
    if arguments.ahead:
        return compile_ahead(arguments.out)
    with collecting() as collection:
        collect_all(collection, whole=arguments.all)
    launches = [one for one in collection.launches.values() if arguments.kernel in one.name]
    shard, shards = arguments.shard
    chosen = (launches if arguments.all else representatives(launches))[shard::shards]
    print(f"{collection.count} launches seen, {len(launches)} different, {len(chosen)} compiled")
    if arguments.list:
        print("\n".join(str(launch) for launch in chosen))
        return 0
    made = compile_all(chosen, arguments.capability or CAPABILITIES, arguments.processes)
    print(table(made))
    faults = [f"sm_{one.capability} {one.launch}: {one.fault}" for one in made if one.fault] + collection.faults
    print("\n".join(f"FAULT {fault}" for fault in faults))
    print(json.dumps(summary(collection, launches, made, faults)))
    return 1 if faults or not made else 0


def compile_ahead(out: Path | None) -> int:
    """On a GPU: kernels that the proof's later parts launch, so that none waits for the compiler. All cores."""
    with multiprocessing.get_context("fork").Pool(1) as pool:  # CUDA and forks do not mix: it is asked elsewhere
        major, minor = pool.apply(torch.cuda.get_device_capability)
    with collecting() as collection:
        collect_ahead(collection)
    queue = [(launch, 10 * major + minor) for launch in collection.launches.values()]
    made = _compile_queue(queue, max((os.cpu_count() or 2) // 2, 1))
    refused = [f"{one.launch}: {one.fault}" for one in made if not one.warps] + collection.faults
    check = {"name": "compiled ahead", "passed": bool(made) and not refused, "kernels": len(made)}
    if refused:
        check["error"] = "; ".join(refused)[:4000]
    found = {"passed": check["passed"], "checks": [check]}
    print(json.dumps(found))
    if out is not None:
        out.write_text(json.dumps(found) + "\n", encoding="utf-8")
    return 0 if found["passed"] else 1


def summary(
    collection: Collection, launches: Sequence[Launch], made: Sequence[Compiled], faults: Sequence[str]
) -> dict[str, Any]:
    return {
        "compilation": triton.__version__,
        "torch": torch.__version__,
        "launches": collection.count,
        "different": len(launches),
        "compiled": len(made),
        "kernels": sorted({one.kernel for one in made}),
        "products": sorted({one.kernel for one in made if one.dots}),
        "largest_spill_bytes": max((one.spill_bytes for one in made), default=0),
        "faults": list(faults),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every launch of every shape: minutes")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--ahead", action="store_true")
    parser.add_argument("--out", type=Path, help="of --ahead")
    parser.add_argument("--seconds", type=float, help="of a part of the proof; not looked at")
    parser.add_argument("--kernel", default="", help="a part of its name")
    parser.add_argument("--capability", type=int, action="append", choices=CAPABILITIES)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--shard", type=shard_of, default=(0, 1), help="1/4: the second of four parts of the launches")
    return parser


if __name__ == "__main__":
    sys.exit(main())
