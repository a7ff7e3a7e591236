"""Whole steps of models on a GPU beside what the machine gives: its bandwidth and its products.

    python -m load.bench.step_gpu [--out FILE.json] [--shapes qwen3-0.6b llama-3-8b qwen3-30b-a3b] [--rounds 20]

Weights are random, made on the GPU. For each shape, correctness first: a recorded step gives the logits of one that
is not. Then

- decode steps of 1, 8, 64 and 256 rows, each at its 512th token, recorded and not. Floor: the bytes of the weights that
  the rows use, experts that nobody chose left out, and of the rows' keys and values, over the rate of a copy;
- a step of a whole prompt. Floor: the operations of its products and its attention over the rate of a large product;
- the runner, fed with plans of 64 rows: a step after the other, and each launched before the tokens of the last one are
  known. Idle: the share of the wall's time in which the GPU had no step to compute.

Both ceilings are measured first. Without a GPU it runs dry on a tiny model, in Triton's interpreter. One JSON line
last, also in the file, which holds what was found so far all the time.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from load.bench.gpu_clock import GpuClock, errors
from load.bench.gpu_models import CONFIGS
from load.bench.gpu_stand import PAGE_TOKENS, Stand
from load.bench.regime import regime
from load.bench.step_gpu_runner import SAMPLED, runner_case
from minisgl_backend.device.device import Device, open_device
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.tensors import expected_tensors
from minisgl_backend.worker.decode_graphs import DecodeGraphs

_GRAPH_TOLERANCE = 0.05  # one rounding in bf16 may send a token to another expert


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    rows: tuple[int, ...]
    context: int  # tokens of a row, the one that is computed among them
    prompts: tuple[tuple[int, int], ...]  # (rows, tokens of each)
    runner: tuple[int, int, int]  # rows, tokens of their prompts, steps three times

    @property
    def longest(self) -> int:
        """Tokens of a row, at most."""
        return max(self.context, *(tokens for _, tokens in self.prompts))

    @property
    def pages(self) -> int:
        """Of the pool."""
        longest = max(self.context * max(self.rows), *(rows * tokens for rows, tokens in self.prompts))
        return longest // PAGE_TOKENS + max(self.rows) + 1


LARGE = Sizes((1, 8, 64, 256), 512, ((1, 512), (1, 4096), (8, 1024)), (64, 448, 16))
SMALL = Sizes((1, 3), 5, ((1, 9), (2, 4)), (2, 3, 1))


@dataclass(frozen=True)
class Ceilings:
    """Of this GPU, as measured."""

    bytes_per_s: float
    operations_per_s: float


def main(given: Sequence[str] | None = None) -> int:
    """0: nothing was wrong with any shape."""
    arguments = parse_arguments(given)
    device = open_device("auto")
    clock = GpuClock(device.torch_device, arguments.rounds)
    ends = time.monotonic() + arguments.seconds
    dtype = torch.bfloat16 if clock.on_gpu else torch.float16  # the interpreter's product of bf16 is wrong
    shapes = arguments.shapes or (("qwen3-0.6b", "llama-3-8b", "qwen3-30b-a3b") if clock.on_gpu else ("tiny-moe",))
    with torch.inference_mode():
        ceilings = Ceilings(clock.copy_bytes_per_s(), clock.operations_per_s(dtype))
        found: dict[str, Any] = {
            "part": "steps",
            **regime(),
            "device": device.name,
            "torch": torch.__version__,
            "dtype": str(dtype),
            "copy_tb_s": round(ceilings.bytes_per_s / 1e12, 4),
            "product_tflop_s": round(ceilings.operations_per_s / 1e12, 2),
            "checks": [],
        }
        for name in shapes:
            measure_shape(name, device, dtype, clock, ceilings, ends, partial(keep, found, arguments.out))
            gc.collect()
            if clock.on_gpu:
                torch.cuda.empty_cache()
    write(found, arguments.out)
    print(json.dumps(found))
    return 0 if found["passed"] else 1


Keep = Callable[[str, Callable[[], dict[str, Any]]], bool]
"""(name, work): keeps what work returns, or how it failed."""


def measure_shape(
    name: str, device: Device, dtype: torch.dtype, clock: GpuClock, ceilings: Ceilings, ends: float, keep: Keep
) -> None:
    """All of one shape. What fails costs no other."""
    made: list[Stand] = []
    sizes = LARGE if clock.on_gpu else SMALL

    def build() -> dict[str, Any]:
        if time.monotonic() > ends - 10:
            raise TimeoutError("not begun: hardly any time is left")
        began = time.monotonic()
        stand = Stand(CONFIGS[name], device, dtype, pages=sizes.pages, context_tokens=sizes.longest + PAGE_TOKENS)
        stand.fill_pool()
        made.append(stand)
        device.synchronize()
        return {
            "weights_gb": round(weight_bytes(made[0].spec, dtype) / 1e9, 2),
            "s": round(time.monotonic() - began, 1),
        }

    if not keep(f"{name} is built", build):
        return
    stand = made[0]
    graphs: list[DecodeGraphs] = []
    if keep(f"{name} is recorded", lambda: recorded(stand, sizes, graphs)):
        for rows in sizes.rows:
            keep(f"{name} decode {rows}", lambda rows=rows: decode_case(stand, graphs[0], sizes, rows, clock, ceilings))  # type: ignore[misc]
        keep(f"{name} runner, greedy", lambda: runner_case(stand, graphs[0], *sizes.runner))
        keep(f"{name} runner, sampled", lambda: runner_case(stand, graphs[0], *sizes.runner, SAMPLED))
        graphs[0].close()
    for count, tokens in sizes.prompts:
        keep(
            f"{name} prompt {count} x {tokens}",
            lambda count=count, tokens=tokens: prompt_case(stand, count, tokens, clock, ceilings),  # type: ignore[misc]
        )


def recorded(stand: Stand, sizes: Sizes, graphs: list[DecodeGraphs]) -> dict[str, Any]:
    """Recordings of all sizes, and that they give what steps give that are not recorded.

    Bit for bit where the machine's library of products takes the same way in a recording; told, not asked for.
    """
    began, same = time.monotonic(), {}
    graphs.append(stand.graphs(sizes.rows, tell=lambda line: None))
    graphs[0].warm_up()
    took = round(time.monotonic() - began, 1)
    for count in sizes.rows:
        rows = stand.rows(count, sizes.context - 1, 1)
        tokens, positions = stand.inputs(rows)
        expected = stand.forward(rows, tokens, positions)
        got = graphs[0].logits(tokens, positions, rows.page_tables, rows.starts)
        assert got is not None, "the model can not be recorded"
        assert bool(got.isfinite().all()), f"logits of {count} rows are not finite"
        rms, _ = errors(got, expected)
        assert rms < _GRAPH_TOLERANCE, f"logits of {count} rows differ by {rms:.3g} of their root mean square"
        same[count] = torch.equal(got, expected)
    return {"s": took, "held_mb": round(stand.recorder.held_bytes / 1e6, 1), "bit_for_bit": same}


def decode_case(
    stand: Stand, graphs: DecodeGraphs, sizes: Sizes, count: int, clock: GpuClock, ceilings: Ceilings
) -> dict[str, Any]:
    """Milliseconds of a decode step, both ways."""
    rows = stand.rows(count, sizes.context - 1, 1)
    tokens, positions = stand.inputs(rows)
    graph_ms = clock.median_ms(lambda: graphs.logits(tokens, positions, rows.page_tables, rows.starts), captured=False)
    eager_ms = clock.median_ms(lambda: stand.forward(rows, tokens, positions), captured=False)
    kv_bytes = count * sizes.context * stand.spec.num_layers * 2 * stand.spec.num_kv_heads * stand.spec.head_dim
    touched = weight_bytes(stand.spec, stand.dtype, rows=count) + kv_bytes * stand.dtype.itemsize
    operations = 2 * count * used_weights(stand.spec)
    floor_ms = 1e3 * max(touched / ceilings.bytes_per_s, operations / ceilings.operations_per_s)
    return {
        "graph_ms": round(graph_ms, 4),
        "eager_ms": round(eager_ms, 4),
        "floor_ms": round(floor_ms, 4),
        "of_floor": round(graph_ms / floor_ms, 3),
        "eager_of_graph": round(eager_ms / graph_ms, 2),
        "tokens_per_s": round(count / graph_ms * 1e3, 1),
    }


def prompt_case(stand: Stand, count: int, tokens: int, clock: GpuClock, ceilings: Ceilings) -> dict[str, Any]:
    """One step of whole prompts, the head for the last token of each alone."""
    rows = stand.rows(count, 0, tokens)
    given = stand.inputs(rows)
    assert bool(stand.forward(rows, *given).isfinite().all()), "logits are not finite"
    ms = clock.median_ms(lambda: stand.forward(rows, *given), captured=False)
    head = stand.spec.vocab_size * stand.spec.hidden_size
    pairs = count * tokens * (tokens + 1) // 2
    operations = 2 * count * (tokens * (used_weights(stand.spec) - head) + head)
    operations += 4 * pairs * stand.spec.num_heads * stand.spec.head_dim * stand.spec.num_layers
    floor_ms = operations / ceilings.operations_per_s * 1e3
    return {
        "ms": round(ms, 3),
        "floor_ms": round(floor_ms, 3),
        "of_floor": round(ms / floor_ms, 3),
        "tokens_per_s": round(count * tokens / ms * 1e3),
        "tflop_s": round(operations / ms / 1e9, 1),
    }


def weight_bytes(spec: ModelSpec, dtype: torch.dtype, rows: int = 1 << 20) -> int:
    """Of the products that a step of so many rows reads. Experts: as many as even choices of the rows touch."""
    share = 1.0
    if spec.moe is not None:
        share = 1 - (1 - spec.moe.top_k / spec.moe.num_experts) ** rows
    return round(sum(size * (share if expert else 1) for size, expert in _products(spec)) * dtype.itemsize)


def used_weights(spec: ModelSpec) -> float:
    """Numbers in the products that one token goes through."""
    share = 1.0 if spec.moe is None else spec.moe.top_k / spec.moe.num_experts
    return sum(size * (share if expert else 1) for size, expert in _products(spec))


def _products(spec: ModelSpec) -> list[tuple[int, bool]]:
    """(numbers, whether it is an expert's) of each weight; an embedding counts only where it is the head too."""
    found = []
    for name, shape in expected_tensors(spec).items():
        if len(shape) > 1 and (spec.tie_embeddings or "embed" not in name):
            found.append((int(np.prod(shape)), ".experts." in name))
    return found


def keep(found: dict[str, Any], out: Path | None, name: str, work: Callable[[], dict[str, Any]]) -> bool:
    """Into `found`, and the file."""
    row: dict[str, Any] = {"name": name, "passed": False}
    try:
        row |= work()
        row["passed"] = True
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:1500]
    print(json.dumps(row), flush=True)
    found["checks"].append(row)
    write(found, out)
    return bool(row["passed"])


def write(found: dict[str, Any], out: Path | None) -> None:
    """The file of the proof's part."""
    found["passed"] = bool(found["checks"]) and all(row["passed"] for row in found["checks"])
    if out is not None:
        out.write_text(json.dumps(found) + "\n", encoding="utf-8")


def parse_arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shapes", nargs="+", choices=CONFIGS, default=[])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=600.0, help="a shape that begins later is left out, and fails")
    return parser.parse_args(given)


if __name__ == "__main__":
    sys.exit(main())
