"""Ours beside OpenVINO GenAI, llama.cpp and vLLM's CPU build: the same prompts, interleaved, in one run.

    python -m load.peers.install_openvino                      (once for each peer)
    python -m load.bench.peers --engines llm,triton,openvino --cases 128/128@1,4 512+32/32@32

An engine is NAME or NAME:DTYPE. Correctness first (peer_checks.py): how long greedy answers agree with ours is
reported, and an engine whose next tokens are not ours is refused. Then a warm-up, then --repeats rounds per case in
which the engines take turns, each round with new prompts (token ids, fixed seed, the same for all). All engines stay
loaded; only one has work at a time. What others kept busy meanwhile is in each row: on a machine that is not idle no
number is worth keeping. An engine that can not start is named with its reason. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from tqdm import tqdm

from load.bench.peer_cases import DEFAULT, Case, make_prompts, parse_cases, word_ids
from load.bench.peer_checks import CHECK_TOKENS, CHECKS, check_all, shown
from load.bench.peer_process import Engine, EngineBroke, start
from load.bench.peer_report import Sample, row, sample, table
from load.bench.peer_runners import DTYPES, NAMES, OURS, NotInstalled, runner
from load.bench.regime import regime
from minisgl_backend.models.locate import locate_model
from minisgl_backend.text.tokenizer import Tokenizer

_CHECK_CONTEXT = 32 + CHECK_TOKENS  # the texts of the check are shorter


def main() -> None:
    """Runs the cases of the command line."""
    arguments = parse_arguments(sys.argv[1:])
    tokenizer = Tokenizer.load(locate_model(arguments.model))
    checks = [tokenizer.encode(text) for text in CHECKS]
    refused: dict[str, str] = {}
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
        engines = start_all(stack, arguments, logs, refused)
        if not any(name.split(":")[0] in OURS for name in engines):
            raise SystemExit("none of ours started: the others' answers can not be checked")
        agreed = check_all(engines, checks, arguments.least_agreement, refused)
        print(shown(agreed), flush=True)
        samples = measure(engines, arguments.cases, word_ids(tokenizer), arguments.repeats)
        described = {
            name: {**vars(engine.ready), "agrees": vars(agreed[name]), "peak_bytes": engine.peak_bytes()}
            for name, engine in engines.items()
        }
    rows = list(rows_of(samples, arguments.cases))
    print(table(rows))
    for name, why in refused.items():
        print(f"{name} was left out: {why}")
    settings = {
        key: [str(case) for case in value] if key == "cases" else value for key, value in vars(arguments).items()
    }
    last = {"bench": "peers", **regime(), **settings, "engines_seen": described, "refused": refused, "rows": rows}
    print(json.dumps(last))


def start_all(
    stack: ExitStack, arguments: argparse.Namespace, logs: Path, refused: dict[str, str]
) -> dict[str, Engine]:
    """The engines that start, one after the other; why the others did not goes to `refused`."""
    engines = {}
    streams = max(len(CHECKS), *(case.streams for case in arguments.cases))
    context = max(_CHECK_CONTEXT, *(case.context for case in arguments.cases))
    for name in arguments.engines:
        try:
            made = runner(name, arguments, streams, context)
            engines[name] = stack.enter_context(start(made, logs, arguments.start_s))
        except (NotInstalled, EngineBroke) as error:
            refused[name] = str(error)
        print(f"{name}: {refused.get(name, 'started')}", flush=True)
    return engines


def measure(
    engines: Mapping[str, Engine], cases: Sequence[Case], words: Sequence[int], repeats: int
) -> dict[tuple[str, Case], list[Sample]]:
    """A warm-up of each case, then its rounds; the engines take turns within each."""
    samples: dict[tuple[str, Case], list[Sample]] = {(name, case): [] for case in cases for name in engines}
    rounds = [("warm-up", case) for case in cases] + [(f"round {n}", case) for n in range(repeats) for case in cases]
    for number, (seed, case) in enumerate(tqdm(rounds, desc="rounds", unit="round")):
        prompts = make_prompts(words, case, seed)
        names = list(engines)
        turn = number % max(1, len(names))  # nobody is always the one after the same other
        for name in names[turn:] + names[:turn]:
            warm_up = seed == "warm-up"
            done = engines[name].generate(prompts, min(4, case.output) if warm_up else case.output)
            if not warm_up:
                samples[name, case].append(sample(done))
    return samples


def rows_of(samples: Mapping[tuple[str, Case], list[Sample]], cases: Sequence[Case]) -> Iterator[dict[str, object]]:
    """The rows, case by case."""
    for case in cases:
        here = {name: values for (name, of), values in samples.items() if of == case}
        ours = {name: values for name, values in here.items() if name.split(":")[0] in OURS}
        for name, values in here.items():
            yield row(name, str(case), values, ours)


def parse_arguments(given: Sequence[str]) -> argparse.Namespace:
    """The command line; engines come back as NAME:DTYPE, one of ours first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--engines", default=",".join(NAMES), help="NAME or NAME:DTYPE, with commas: " + ", ".join(NAMES))
    add("--dtype", default="fp32", choices=DTYPES, help="of every engine that names none")
    add("--cases", nargs="+", default=list(DEFAULT), metavar="INPUT/OUTPUT@STREAMS,…")
    add("--repeats", type=int, default=3)
    add("--model", default="smollm2")
    add("--threads", type=int, default=0, help="of our worker; 0: its default. The others take every core")
    add("--kv-bytes", type=int, default=2 << 30, help="of each engine's KV cache")
    add("--least-agreement", type=float, default=0.75, help="share of next tokens that must be ours")
    add("--start-s", type=float, default=300.0, help="patience with a start")
    arguments = parser.parse_args(given)
    try:
        arguments.cases = parse_cases(arguments.cases)
        arguments.engines = parse_engines(arguments.engines, arguments.dtype)
    except ValueError as error:
        parser.error(str(error))
    if arguments.repeats < 1:
        parser.error("--repeats must be at least 1")
    return arguments


def parse_engines(text: str, dtype: str, *, beside_ours: bool = True) -> list[str]:
    """Each as NAME:DTYPE. Ours come first, since the others' answers are held beside the first one's.

    beside_ours: one of them must be there.
    """
    engines = []
    for part in text.split(","):
        name, _, own = part.partition(":")
        if name not in NAMES:
            raise ValueError(f"engine {name!r} is none of {', '.join(NAMES)}")
        allowed = NAMES[name]
        if (own or dtype) not in allowed:
            raise ValueError(f"engine {name!r} takes no dtype {own or dtype!r}, only {', '.join(allowed)}")
        engines.append(f"{name}:{own or dtype}")
    if len(set(engines)) < len(engines):
        raise ValueError("an engine is named twice")
    if beside_ours and not any(engine.split(":")[0] in OURS for engine in engines):
        raise ValueError(f"at least one of {', '.join(OURS)} must be there: the others' answers are held beside ours")
    return sorted(engines, key=lambda engine: engine.split(":")[0] not in OURS)


if __name__ == "__main__":
    main()
