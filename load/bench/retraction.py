"""What optimistic admission is worth on a real model: `reserve: learned` against `full` at 4,096 tokens of K/V each.

    python -m load.bench.retraction            (SmolLM2 on two old cores: about five minutes)

Prompts of 128 tokens, up to 512 new ones, all there at once. Where an answer ends is drawn (1 … 512, uniformly): its
token is then taken for the end token, whatever the model said; everything before is the model's own. The scheduler
drives the worker directly, without actors. Nothing may be lost or repeated: every answer must have its drawn length,
and the greedy tokens of both runs are compared. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Literal, get_args

from tqdm import tqdm

from load.bench.regime import regime
from load.bench.simulated import to_sequence
from load.workloads import independent
from load.workloads.tenants import STOP_TOKEN, Request
from minisgl_backend.actors.executors.build import make_limits
from minisgl_backend.config import EngineConfig, resolve_config
from minisgl_backend.kvpool.sizing import bytes_per_page
from minisgl_backend.messages.plan import BatchPlan, StepResult
from minisgl_backend.models.folder import read_model_spec
from minisgl_backend.models.locate import locate_model
from minisgl_backend.scheduler.scheduler import Scheduler
from minisgl_backend.worker.build import build_runner

Reserve = Literal["full", "learned"]

KV_TOKENS, PROMPT_TOKENS, MAX_NEW_TOKENS = 4096, 128, 512
_CONTEXT_TOKENS = 1024


@dataclass
class Seen:
    """What one run brought."""

    tokens: dict[int, list[int]] = field(default_factory=dict)  # by the request's number
    running: list[int] = field(default_factory=list)  # sequences with a slot, at every step in which others wait
    seconds: float = 0.0
    retractions: int = 0

    @property
    def output_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))


def main() -> None:
    """Runs both and compares them."""
    arguments = _parser().parse_args()
    folder = locate_model(arguments.model)
    requests = independent.generate(arguments.requests, PROMPT_TOKENS, MAX_NEW_TOKENS, (1, arguments.longest), 0)
    seen = {reserve: run(_config(arguments, reserve, folder), folder, requests) for reserve in get_args(Reserve)}
    for one in seen.values():
        for request in requests:
            assert len(one.tokens[request.number]) == len(request.answer), f"request {request.number}: tokens lost"
    report(seen["full"], seen["learned"], vars(arguments))


def _config(arguments: argparse.Namespace, reserve: Reserve, folder: Path) -> EngineConfig:
    spec = read_model_spec(folder)
    settings = {"model": arguments.model, "device": arguments.device, "dtype": "fp32", "reserve": reserve}
    sizes = {"max_running": 32, "token_budget": 256, "page_size": 16, "context_tokens": _CONTEXT_TOKENS}
    page_bytes = bytes_per_page(spec.num_layers, spec.num_kv_heads, spec.head_dim, 4, sizes["page_size"])
    return resolve_config(settings, sizes, {"kv_bytes": KV_TOKENS // sizes["page_size"] * page_bytes})


def run(config: EngineConfig, folder: Path, requests: list[Request]) -> Seen:
    """All requests through a fresh worker."""
    runner = build_runner(config, folder)
    try:
        runner.warm_up()
        limits = make_limits(config, runner.num_pages, _CONTEXT_TOKENS)
        assert limits.pool_tokens == KV_TOKENS, f"the pool holds {limits.pool_tokens} tokens"
        return _drive(Scheduler(limits), runner.run, requests, config.reserve)
    finally:
        runner.close()


def _drive(
    scheduler: Scheduler, run_step: Callable[[BatchPlan], StepResult], requests: list[Request], title: str
) -> Seen:
    seen = Seen(tokens={request.number: [] for request in requests})
    owner: dict[int, Request] = {}  # of each slot
    begin = time.perf_counter()
    for request in requests:
        scheduler.add(to_sequence(request), 0.0)
    with tqdm(total=sum(len(request.answer) for request in requests), desc=title, unit="token") as bar:
        while scheduler.has_work:
            plan = scheduler.plan(time.perf_counter() - begin)
            assert plan is not None, "sequences wait and nothing is planned"
            if scheduler.gauges().waiting:
                seen.running.append(scheduler.gauges().running)
            for admission in plan.admissions:
                owner[admission.slot] = requests[admission.sampling.seed]
            result = _with_ends(plan, run_step(plan), owner)
            progress = scheduler.apply(result, time.perf_counter() - begin)
            for id, token in zip(progress.sequence_ids, progress.tokens, strict=True):
                seen.tokens[id - 1].append(token)
            bar.update(len(progress.tokens))
    seen.seconds = time.perf_counter() - begin
    seen.retractions = scheduler.gauges().retractions
    return seen


def _with_ends(plan: BatchPlan, result: StepResult, owner: dict[int, Request]) -> StepResult:
    """The result with the drawn ends in it. A token of the model that would end an answer is another one instead."""
    tokens = []
    ends = [
        (owner[slot], start + length)
        for slot, start, length, samples in zip(
            plan.row_slots, plan.row_starts, plan.row_lengths, plan.row_samples, strict=True
        )
        if samples
    ]
    for (request, position), token in zip(ends, result.tokens, strict=True):
        number = position - len(request.prompt)
        if number + 1 == len(request.answer) < request.max_new_tokens:
            token = STOP_TOKEN
        elif token == STOP_TOKEN:
            token = STOP_TOKEN + 1
        tokens.append(token)
    return StepResult(result.step, tuple(tokens), result.failed)


def report(full: Seen, learned: Seen, settings: dict[str, object]) -> None:
    """Prints both, their ratios, and the last line."""
    rows = []
    for name, seen in (("full", full), ("learned", learned)):
        rows.append(
            {
                "reserve": name,
                "mean_running_while_others_wait": round(mean(seen.running), 2),
                "output_tokens_per_s": round(seen.output_tokens / seen.seconds, 2),
                "seconds": round(seen.seconds, 1),
                "retractions": seen.retractions,
            }
        )
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()))
    concurrency = mean(learned.running) / mean(full.running)
    throughput = full.seconds / learned.seconds
    same = sum(full.tokens[number] == learned.tokens[number] for number in full.tokens)
    print(
        f"learned runs {concurrency:.2f} times as many sequences (1.5 are asked for) at {throughput:.2f} the throughput"
    )
    print(
        f"{same} of {len(full.tokens)} answers are the same to the token (others: greedy ties under other batch sizes)"
    )
    figures = {"concurrency_ratio": round(concurrency, 3), "throughput_ratio": round(throughput, 3), "same": same}
    print(json.dumps({"bench": "retraction", **regime(), **settings, **figures, "rows": rows}))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="smollm2")
    add("--device", default="auto")
    add("--requests", type=int, default=20)
    add("--longest", type=int, default=512, help="of the answers that are drawn, in tokens")
    return parser


if __name__ == "__main__":
    main()
