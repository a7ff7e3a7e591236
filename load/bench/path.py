"""What stands around the model: the engine alone (`LLM`) and through tritonserver with gRPC streams, side by side.

    python -m load.bench.path                                            (SmolLM2)
    python -m load.bench.path --device fake --fake-step-ms 5 --streams 64      (no model: the path alone)

Correctness first: both paths must give the same tokens to the same prompts. Then the time to a first token of one
short request at a time, the paths taking turns; then, for each number of streams, a warm-up and --repeats rounds, the
paths again taking turns with the same prompts (token ids, fixed seed, new ones in each round). Both engines stay
loaded, one has work. CPU time is told for each process, in seconds for a thousand output tokens; `client` is the
process that asks, which for `llm` holds the host too. Medians, with the lowest and highest round; one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

from load.bench.peer_cases import Case, make_prompts, word_ids
from load.bench.peer_checks import CHECK_TOKENS, CHECKS
from load.bench.peer_process import Engine, start
from load.bench.peer_report import Sample, Spread, sample, spread
from load.bench.peer_runners import DTYPES, OURS, ours
from load.bench.regime import regime
from minisgl_backend.config import parse_setting
from minisgl_backend.models.locate import locate_model
from minisgl_backend.text.tokenizer import Tokenizer

_START_S = 300.0

TARGETS = {
    "tokens/s, through Triton over alone": "at least 0.9 at 1 and 16 streams, 0.85 at 32",
    "tokens per response": "at most 1.3",
    "P95 ITL, through Triton over alone": "at most 1.2",
    "TTFT, through Triton less alone": "under 5 ms",
}


@dataclass(frozen=True)
class Seen:
    """One round of one path."""

    sample: Sample
    cpu_s: Mapping[str, float]  # process → seconds for a thousand tokens
    answers: tuple[tuple[int, ...], ...]


def main() -> None:
    """Runs the cases of the command line."""
    arguments = parse_arguments(sys.argv[1:])
    tokenizer = Tokenizer.load(locate_model(arguments.model))
    words = word_ids(tokenizer)
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="path-")))
        engines = {
            path: stack.enter_context(start(ours(path, path, arguments.model, settings(arguments)), logs, _START_S))
            for path in OURS
        }
        check_same_answers(engines, [tokenizer.encode(text) for text in CHECKS])
        first_tokens = measure_first_tokens(engines, words, arguments.ttft_requests)
        rounds = {
            streams: measure(engines, words, Case(0, arguments.input, arguments.output, streams), arguments.repeats)
            for streams in arguments.streams
        }
    rows = [row(streams, seen) for streams, seen in rounds.items()]
    print("\n".join(map(lines_of, rows)))
    print("TTFT of one stream, ms: " + ", ".join(f"{key} {Spread(*value)}" for key, value in first_tokens.items()))
    print("asked for: " + "; ".join(f"{key} {value}" for key, value in TARGETS.items()))
    last = {"bench": "path", **regime(), **vars(arguments), "ttft_ms": first_tokens, "rows": rows}
    print(json.dumps(last))


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Of both engines."""
    made = {"dtype": arguments.dtype, "device": arguments.device, "kv_bytes": arguments.kv_bytes}
    if arguments.device == "fake":
        made["fake_step_ms"] = arguments.fake_step_ms
    return {**made, "max_running": max(arguments.streams), **arguments.set}


def check_same_answers(engines: Mapping[str, Engine], texts: Sequence[Sequence[int]]) -> None:
    """One prompt at a time, so that both compute the same steps in every dtype."""
    for text in texts:
        answers = {path: engine.generate([text], CHECK_TOKENS).streams[0].token_ids for path, engine in engines.items()}
        assert answers["llm"] == answers["triton"], f"the paths disagree: {answers}"


def measure_first_tokens(engines: Mapping[str, Engine], words: Sequence[int], requests: int) -> dict[str, list[float]]:
    """TTFT in ms of short prompts alone in the engine, and what Triton adds to its neighbour in time."""
    seen: dict[str, list[float]] = {path: [] for path in engines}
    for number in range(-2, requests):
        (prompt,) = make_prompts(words, Case(0, 8, 2, 1), f"first token {number}")
        for path in turns(engines, number):
            ttft_s = engines[path].generate([prompt], 2).streams[0].times_s[0]
            if number >= 0:  # else a warm-up
                seen[path].append(1000 * ttft_s)
    added = [through - alone for alone, through in zip(seen["llm"], seen["triton"], strict=True)]
    return {name: _rounded(values) for name, values in (*seen.items(), ("added", added))}


def measure(engines: Mapping[str, Engine], words: Sequence[int], case: Case, repeats: int) -> dict[str, list[Seen]]:
    """A warm-up, then the rounds."""
    seen: dict[str, list[Seen]] = {path: [] for path in engines}
    for number in tqdm(range(-1, repeats), desc=f"{case}", unit="round"):
        prompts = make_prompts(words, case, f"round {number}")
        for path in turns(engines, number):
            done = measure_round(engines[path], prompts, case.output)
            if number >= 0:
                seen[path].append(done)
    return seen


def measure_round(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> Seen:
    """All prompts at once."""
    before = cpu_by_process(engine)
    round = engine.generate(prompts, tokens)
    thousands = len(prompts) * tokens / 1000
    used = {name: (cpu_s - before.get(name, 0.0)) / thousands for name, cpu_s in cpu_by_process(engine).items()}
    return Seen(sample(round), used, tuple(tuple(stream.token_ids) for stream in round.streams))


def cpu_by_process(engine: Engine) -> dict[str, float]:
    """CPU seconds since its start of each process that takes part, by name; `rest` is that of all others."""
    used: dict[str, float] = {}
    for process in engine.processes():
        try:
            name = "client" if process.pid == engine.pid else process_name(process.cmdline())
            times = process.cpu_times()
        except psutil.Error:
            continue
        used[name] = used.get(name, 0.0) + times.user + times.system
    return used


def process_name(command: Sequence[str]) -> str:
    """Which part of the engine a command line is."""
    line = " ".join(command)
    if "minisgl_backend.actors.child" in command:
        return command[command.index("minisgl_backend.actors.child") + 1]
    if "minisgl_backend.actors.host" in command:
        return "host"
    if "triton_python_backend_stub" in line:
        return "stub" if "/minisgl/1/model.py" in line else "rest"
    return "tritonserver" if command and Path(command[0]).name == "tritonserver" else "rest"


def turns(engines: Mapping[str, Engine], number: int) -> list[str]:
    """Neither is always the second."""
    return list(engines)[:: -1 if number % 2 else 1]


def row(streams: int, seen: Mapping[str, Sequence[Seen]]) -> dict[str, Any]:
    """A row of the table and of the last line: each number as [median, lowest, highest] over the rounds."""
    alone, through = seen["llm"], seen["triton"]
    made: dict[str, Any] = {"streams": streams}
    for path, rounds in seen.items():
        fields = {
            field: _rounded([getattr(one.sample, field) for one in rounds])
            for field in ("tokens_per_s", "ttft_ms", "itl_p95_ms", "tokens_per_piece", "others_cores")
        }
        names = sorted({name for one in rounds for name in one.cpu_s})
        cpu = {name: _rounded([one.cpu_s.get(name, 0.0) for one in rounds]) for name in names}
        made[path] = {**fields, "cpu_s_per_1000_tokens": cpu}
    pairs = list(zip(alone, through, strict=True))
    made["tokens_per_s_ratio"] = _rounded([two.sample.tokens_per_s / one.sample.tokens_per_s for one, two in pairs])
    made["itl_p95_ratio"] = _rounded([_ratio(two.sample.itl_p95_ms, one.sample.itl_p95_ms) for one, two in pairs])
    same = [mine == other for one, two in pairs for mine, other in zip(one.answers, two.answers, strict=True)]
    made["same_answers"] = round(sum(same) / len(same), 3)  # rounding may part them where steps hold other rows
    return made


def lines_of(row: Mapping[str, Any]) -> str:
    """For people."""
    lines = []
    for path in OURS:
        told = dict(row[path])
        cpu = told.pop("cpu_s_per_1000_tokens")
        numbers = "  ".join(f"{key} {Spread(*value)}" for key, value in told.items())
        shares = ", ".join(f"{name} {value[0]:.3f}" for name, value in cpu.items())
        lines += [f"{row['streams']:>3} streams {path:<6} {numbers}", f"{'':>19}CPU s per 1,000 tokens: {shares}"]
    rate, itl = Spread(*row["tokens_per_s_ratio"]), Spread(*row["itl_p95_ratio"])
    lines.append(f"{'':>19}tokens/s {rate} of the engine alone, P95 ITL {itl}, same answers {row['same_answers']:.0%}")
    return "\n".join(lines)


def _ratio(value: float, base: float) -> float:
    return value / base if base else 1.0


def _rounded(values: Sequence[float]) -> list[float]:
    found = spread(values)
    return [round(value, 4) for value in (found.median, found.low, found.high)]


def parse_arguments(given: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="smollm2")
    add("--dtype", default="auto", choices=("auto", *DTYPES))
    add("--device", default="auto", help="`fake` computes no model")
    add("--fake-step-ms", type=float, default=5.0, help="with --device fake: time of a step")
    add("--streams", type=lambda text: [int(part) for part in text.split(",")], default=[1, 16, 32])
    add("--input", type=int, default=128, help="tokens of a prompt")
    add("--output", type=int, default=128, help="tokens of an answer")
    add("--repeats", type=int, default=3)
    add("--ttft-requests", type=int, default=20)
    add("--kv-bytes", type=int, default=1 << 30, help="of each engine's KV cache")
    add("--set", action="append", type=parse_setting, default=[], metavar="KEY=VALUE", help="of both engines")
    arguments = parser.parse_args(given)
    if min(arguments.repeats, arguments.ttft_requests, arguments.input, *arguments.streams) < 1 or arguments.output < 2:
        parser.error("repeats, requests, streams and input must be at least 1, output at least 2")
    arguments.set = dict(arguments.set)
    return arguments


if __name__ == "__main__":
    main()
