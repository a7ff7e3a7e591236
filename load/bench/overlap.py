"""How long a worker waits between two steps, with the next step planned ahead (`overlap`) and at depth 0.

    python -m load.bench.overlap            (SmolLM2 on two cores: about three minutes)

Two engines with a step trace each. Correctness first: greedy tokens must be the same at both depths. Then --repeats
rounds for each number of streams, the engines taking turns: all streams decode together, and what the trace says of the
time in which every one of them was running counts. One has work, the other waits for messages. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from load.bench.regime import regime
from load.step_trace import Event, Summary, end_of, read_trace, summarise
from load.workloads.words import make_prompts
from minisgl_backend.config import parse_setting
from minisgl_backend.llm import LLM
from minisgl_backend.text.parameters import SamplingParams

DEPTHS = {"depth 0": False, "overlap": True}

_CHECKED_PROMPTS, _CHECKED_TOKENS = 8, 24


@dataclass(frozen=True)
class Window:
    """The part of a round in which all streams ran, in seconds of the monotonic clock."""

    depth: str
    streams: int
    began_s: float
    ended_s: float


def main() -> None:
    """Runs the cases of the command line."""
    arguments = _parser().parse_args()
    settings = dict(parse_setting(text) for text in arguments.set)
    prompts = make_prompts(arguments.model, max(*arguments.streams, _CHECKED_PROMPTS), arguments.input)
    with tempfile.TemporaryDirectory() as folder:
        files = {depth: Path(folder) / f"{number}.json" for number, depth in enumerate(DEPTHS)}
        with ExitStack() as stack:
            engines = {
                depth: stack.enter_context(_engine(arguments, settings, overlap, files[depth]))
                for depth, overlap in DEPTHS.items()
            }
            check_same_tokens(engines, prompts[:_CHECKED_PROMPTS])
            cases = [(depth, streams) for streams in arguments.streams for depth in DEPTHS]
            windows = [
                measure_round(engines[depth], depth, prompts[:streams], arguments.output)
                for _ in tqdm(range(arguments.repeats), desc="rounds", unit="round")
                for depth, streams in cases
            ]
        traces = {depth: read_trace(file) for depth, file in files.items()}
    rows = [describe(traces[depth], [one for one in windows if (one.depth, one.streams) == (depth, streams)])
            for depth, streams in cases]  # fmt: skip
    report(rows, vars(arguments))


def _engine(arguments: argparse.Namespace, settings: dict[str, Any], overlap: bool, trace: Path) -> LLM:
    sizes = {"max_running": max(*arguments.streams, _CHECKED_PROMPTS), "kv_bytes": arguments.kv_bytes}
    own = {"dtype": arguments.dtype, "device": arguments.device, "overlap": overlap, "step_trace": str(trace)}
    return LLM(arguments.model, **{**sizes, **own, **settings})


def check_same_tokens(engines: dict[str, LLM], prompts: Sequence[str]) -> None:
    """Raises AssertionError when greedy answers differ between the depths."""
    params = SamplingParams(temperature=0.0, max_tokens=_CHECKED_TOKENS, ignore_eos=True)
    answers = [
        [answer.token_ids for answer in engine.generate(prompts, params, progress=False)] for engine in engines.values()
    ]
    assert all(len(tokens) == _CHECKED_TOKENS for tokens in answers[0])
    assert all(answer == answers[0] for answer in answers), f"the depths disagree: {answers}"


def measure_round(engine: LLM, depth: str, prompts: Sequence[str], output: int) -> Window:
    """All prompts at once, `output` tokens each."""
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)

    def read(prompt: str) -> tuple[float, float]:
        times = [time.monotonic() for _ in engine.stream(prompt, params)]
        return times[0], times[-1]

    with ThreadPoolExecutor(len(prompts)) as pool:
        times = list(pool.map(read, prompts))
    return Window(depth, len(prompts), max(first for first, _ in times), min(last for _, last in times))


def describe(trace: Sequence[Event], windows: Sequence[Window]) -> dict[str, Any]:
    """A row: what the trace says of the windows, which are of one depth and one number of streams."""
    spans: list[Event] = []
    for window in windows:
        spans += [span for span in trace if window.began_s <= span["ts"] / 1e6 and end_of(span) / 1e6 <= window.ended_s]
    summary: Summary = summarise(spans)
    steps = [span for span in spans if span["name"] == "step"]
    return {
        "depth": windows[0].depth,
        "streams": windows[0].streams,
        "rows": sum(span["args"]["rows"] for span in steps) / len(steps),
        "steps": summary.steps,
        "step_ms": round(summary.step_ms, 2),
        "gap_ms": round(summary.gap_ms, 3),
        "idle_share": round(summary.idle_share, 5),
        "early_share": round(summary.early_share, 4),
    }


def report(rows: Sequence[dict[str, Any]], settings: dict[str, Any]) -> None:
    """Prints the rows and the last line."""
    for row in rows:
        print(
            f"{row['depth']:>8} {row['streams']:>3} streams  {row['step_ms']:8.1f} ms a step  "
            f"gap {row['gap_ms']:6.2f} ms  idle {row['idle_share']:6.2%}  next plan there {row['early_share']:6.1%}"
        )
    print(json.dumps({"bench": "overlap", **regime(), **settings, "rows": rows}))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="smollm2")
    add("--dtype", default="fp32")
    add("--device", default="auto")
    add("--streams", type=lambda text: [int(part) for part in text.split(",")], default=[16, 32])
    add("--input", type=int, default=32, help="tokens of a prompt")
    add("--output", type=int, default=64, help="tokens of an answer")
    add("--repeats", type=int, default=2)
    add("--kv-bytes", type=int, default=512 << 20)
    add("--set", metavar="KEY=VALUE", action="append", default=[], help="any setting, of both engines")
    return parser


if __name__ == "__main__":
    main()
