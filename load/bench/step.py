"""The worker alone: steps of a model beside the floors of this machine, native, not recorded, and with torch's kernels.

    python -m load.bench.step                                     (SmolLM2 in bf16 on two threads, about a minute)
    python -m load.bench.step --threads 1 --variants native
    python -m load.bench.step --profile --variants native         (then each operator's share of a step, not recorded)

The runner is fed with BatchPlans; there are no actors. Correctness first: with native kernels and with torch's the same
greedy tokens come in fp32. Then the variants take turns in rounds, and medians count:

- decode steps of 1, 8 and 32 rows, each at its 512th token. Floor: the bytes of the products' weights and of the rows'
  keys and values over the bandwidth, which is the best of five reads of as many bytes in the same round;
- one step of a whole prompt. Floor: the operations of its products and its attention over the best rate of a few bf16
  products of square matrices in the same round.

The read and the product are torch's, by the same threads. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from load.bench.ceiling import Clock
from load.bench.regime import regime
from minisgl_backend.config import resolve_config
from minisgl_backend.device.machine import read_machine
from minisgl_backend.device.placement import place
from minisgl_backend.messages.ids import SlotId, StepId
from minisgl_backend.messages.plan import Admission, BatchPlan, PageGrant
from minisgl_backend.messages.sampling import GREEDY
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.models.folder import read_model_spec
from minisgl_backend.models.locate import locate_model
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.worker.build import build_runner
from minisgl_backend.worker.runner import StepRunner

VARIANTS: dict[str, dict[str, Any]] = {
    "native": {"kernels": "native"},
    "unrecorded": {"kernels": "native", "decode_graphs": False},
    "torch": {"kernels": "torch"},
}
_PAGE_TOKENS = 16
_BYTES = {"bf16": 2, "fp32": 4}


class Worker:
    """A runner and the plans that it was given so far. Slot i has pages of its own for a whole context."""

    def __init__(self, arguments: argparse.Namespace, variant: str, dtype: str) -> None:
        self._slots, self._context = max(arguments.rows), max(*arguments.prompts, arguments.context) + _PAGE_TOKENS
        self._slot_pages = -(-self._context // _PAGE_TOKENS)
        self._folder = locate_model(arguments.model)
        self.spec: ModelSpec = read_model_spec(self._folder)
        token_bytes = self.spec.num_layers * 2 * self.spec.num_kv_heads * self.spec.head_dim * _BYTES[dtype]
        settings = {"model": arguments.model, "device": "cpu", "dtype": dtype, "threads": arguments.threads}
        sizes = {"max_running": self._slots, "context_tokens": self._context, "token_budget": 8192}
        pool = {"page_size": _PAGE_TOKENS, "kv_bytes": self._slots * self._slot_pages * _PAGE_TOKENS * token_bytes}
        config = resolve_config(settings, sizes, pool, VARIANTS[variant])
        self._runner: StepRunner = build_runner(config, self._folder)
        self._runner.warm_up()
        self._step = 0

    def prompt(self, slots: Sequence[int], tokens: int) -> tuple[int, ...]:
        """Computes a whole prompt of each, in one step → the token after each."""
        count = -(-(tokens + 1) // _PAGE_TOKENS)
        admissions = tuple(Admission(SlotId(slot), pack_tokens(self._text(slot, tokens)), GREEDY) for slot in slots)
        pages = [range(slot * self._slot_pages, slot * self._slot_pages + count) for slot in slots]
        grants = tuple(PageGrant(SlotId(slot), tuple(own)) for slot, own in zip(slots, pages, strict=True))
        return self._run(admissions, grants, slots, 0, tokens)

    def decode(self, rows: int, position: int) -> tuple[int, ...]:
        """A token of each of the first rows, at a position that is known."""
        return self._run((), (), range(rows), position, 1)

    def close(self) -> None:
        self._runner.close()

    def _run(
        self,
        admissions: tuple[Admission, ...],
        grants: tuple[PageGrant, ...],
        slots: Sequence[int],
        start: int,
        length: int,
    ) -> tuple[int, ...]:
        self._step += 1
        every = len(slots)
        columns = (tuple(slots), (start,) * every, (length,) * every, (1,) * every)
        return self._runner.run(BatchPlan(StepId(self._step), admissions, grants, *columns)).tokens

    def _text(self, slot: int, tokens: int) -> list[int]:
        return [(slot * 7919 + at * 104729 + 11) % (self.spec.vocab_size - 100) + 50 for at in range(tokens)]


def main() -> None:
    """Checks, measures, prints a table and the JSON line."""
    arguments = _parser().parse_args()
    _wait_as_a_worker(arguments.threads)
    same_tokens(arguments)
    workers = {variant: Worker(arguments, variant, arguments.dtype) for variant in arguments.variants}
    spec = next(iter(workers.values())).spec
    results = [_told(prompt_case(workers, spec, tokens, arguments)) for tokens in arguments.prompts]
    for worker in workers.values():
        for slot in range(0, max(arguments.rows), 8):
            worker.prompt(range(slot, min(slot + 8, max(arguments.rows))), arguments.context)
    results += [_told(decode_case(workers, spec, count, arguments)) for count in arguments.rows]
    if arguments.profile:
        for variant, worker in workers.items():
            _profile(variant, worker, arguments)
    said = {"bench": "step", **regime(), "torch": torch.__version__, **vars(arguments)}
    print(json.dumps({**said, "steps": results}))


def same_tokens(arguments: argparse.Namespace) -> None:
    """Asserts it of native and torch's kernels, in fp32, over prompts of odd sizes and eight tokens of each."""
    answers = []
    for variant in ("native", "torch"):
        worker = Worker(arguments, variant, "fp32")
        tokens = [worker.prompt([slot], 37 + slot) for slot in range(3)]
        answers.append(tokens + [worker.decode(1, 37 + at) for at in range(8)])
        worker.close()
    assert answers[0] == answers[1], f"native tokens are not torch's: {answers}"


def prompt_case(
    workers: Mapping[str, Worker], spec: ModelSpec, tokens: int, arguments: argparse.Namespace
) -> dict[str, object]:
    """One row, all its tokens in a step, the head for the last alone."""
    operations = 2 * tokens * layer_weights(spec) + 2 * spec.vocab_size * spec.hidden_size
    pairs = tokens * (tokens + 1) // 2
    operations += 4 * pairs * spec.num_heads * spec.head_dim * spec.num_layers
    steps = {name: lambda worker=worker: worker.prompt([0], tokens) for name, worker in workers.items()}
    side = torch.ones(arguments.side, arguments.side, dtype=_torch_dtype(arguments))
    rate = lambda: 2 * arguments.side**3 / _best_s(lambda: torch.mm(side, side), 5)  # noqa: E731
    ms, ceiling = in_rounds(steps, rate, arguments.rounds, 1)
    row = {"case": "prompt", "tokens": tokens, "ms": ms, "ceiling_gflop_s": round(ceiling / 1e9)}
    return {**row, "floor_ms": operations / ceiling * 1e3}


def decode_case(
    workers: Mapping[str, Worker], spec: ModelSpec, rows: int, arguments: argparse.Namespace
) -> dict[str, object]:
    """A step of some rows, each with `context` tokens of keys and values, its own among them."""
    size = _BYTES[arguments.dtype]
    weights = (layer_weights(spec) + spec.vocab_size * spec.hidden_size) * size
    kept = rows * arguments.context * spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim * size
    words = torch.ones((weights + kept) // 4, dtype=torch.int32).view(torch.float32)
    bandwidth = lambda: words.nbytes / _best_s(words.sum, 5)  # noqa: E731
    steps = {name: lambda worker=worker: worker.decode(rows, arguments.context - 1) for name, worker in workers.items()}
    ms, ceiling = in_rounds(steps, bandwidth, arguments.rounds, arguments.repeats)
    row = {"case": "decode", "rows": rows, "ms": ms, "ceiling_gb_s": round(ceiling / 1e9, 1)}
    return {**row, "floor_ms": (weights + kept) / ceiling * 1e3}


def layer_weights(spec: ModelSpec) -> int:
    """Numbers in the weights of all layers' products, which a dense model has."""
    attention = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim * spec.hidden_size
    return spec.num_layers * (attention + 3 * spec.hidden_size * spec.intermediate_size)


def in_rounds(
    steps: Mapping[str, Callable[[], object]], ceiling: Callable[[], float], rounds: int, repeats: int
) -> tuple[dict[str, float], float]:
    """Rounds in which all take turns → the median of each step's milliseconds, and of the rounds' ceilings."""
    times: dict[str, list[float]] = defaultdict(list)
    ceilings = []
    for step in steps.values():
        step()
    for _ in range(rounds):
        ceilings.append(ceiling())
        for name, step in steps.items():
            times[name] += [_seconds(step) * 1e3 for _ in range(repeats)]
    return {name: statistics.median(each) for name, each in times.items()}, statistics.median(ceilings)


class OperatorTimes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Seconds and calls of each operator, by its name and what it gives."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._clock = clock
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        began = self._clock()
        out = func(*args, **(kwargs or {}))
        took = self._clock() - began
        given = tuple(args[0].shape) if args and isinstance(args[0], Tensor) else ""
        shape = tuple(out.shape) if isinstance(out, Tensor) else ""
        self.seconds[f"{func} {given} → {shape}"].append(took)
        return out


def _profile(variant: str, worker: Worker, arguments: argparse.Namespace) -> None:
    """Of steps that are not recorded; recorded ones show no operators."""
    steps = {f"prompt of {tokens}": lambda tokens=tokens: worker.prompt([0], tokens) for tokens in arguments.prompts}
    steps |= {f"{n} rows": lambda n=n: worker.decode(n, arguments.context - 1) for n in arguments.rows}
    for name, step in steps.items():
        with OperatorTimes() as times:
            whole = [_seconds(step) for _ in range(3)]
        print(f"{variant}, {name}: {statistics.median(whole) * 1e3:.1f} ms", file=sys.stderr)
        dearest = sorted(times.seconds.items(), key=lambda item: -sum(item[1]))
        for operator, each in dearest[:16]:
            took = statistics.median(each) * 1e6
            print(
                f"  {sum(each) / 3 * 1e3:8.2f} ms {len(each) // 3:4} calls {took:8.0f} µs  {operator}", file=sys.stderr
            )


def _wait_as_a_worker(threads: int) -> None:
    """libgomp reads its settings when it is loaded, which it is: begins anew with those of a worker."""
    missing = place(read_machine(), threads=threads).workers[0].environment(os.environ)
    if missing:
        os.execve(sys.executable, [sys.executable, "-m", "load.bench.step", *sys.argv[1:]], {**os.environ, **missing})


def _told(row: dict[str, Any]) -> dict[str, object]:
    """Prints it, and adds ratios to the floor."""
    floor = row["floor_ms"]
    ratios = {name: round(ms / floor, 2) for name, ms in row["ms"].items()}
    ceiling = f"{row['ceiling_gb_s']} GB/s" if "ceiling_gb_s" in row else f"{row['ceiling_gflop_s']} GFLOP/s"
    name = f"prompt of {row['tokens']}" if row["case"] == "prompt" else f"decode, {row['rows']} rows"
    told = ", ".join(f"{name} {ms:.1f} ms ({ratios[name]:.2f})" for name, ms in row["ms"].items())
    print(f"{name}: {told}; floor {floor:.1f} ms at {ceiling}", flush=True)
    ms = {name: round(took, 2) for name, took in row["ms"].items()}
    return {**row, "ms": ms, "floor_ms": round(floor, 2), "of_floor": ratios}


def _best_s(work: Callable[[], object], repeats: int) -> float:
    return min(_seconds(work) for _ in range(repeats))


def _seconds(work: Callable[[], object], clock: Clock = time.perf_counter) -> float:
    began = clock()
    work()
    return clock() - began


def _torch_dtype(arguments: argparse.Namespace) -> torch.dtype:
    return torch.bfloat16 if arguments.dtype == "bf16" else torch.float32


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a dense one")
    parser.add_argument("--dtype", choices=tuple(_BYTES), default="bf16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=512, help="tokens of each row in decode steps")
    parser.add_argument("--prompts", nargs="+", type=int, default=[512, 2048], help="tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5, help="decode steps of a variant in each round")
    parser.add_argument("--side", type=int, default=1536, help="of the matrices whose product tells the matrix rate")
    parser.add_argument("--profile", action="store_true", help="tell the time of each operator")
    return parser


if __name__ == "__main__":
    main()
