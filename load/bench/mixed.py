"""How long running streams wait for a token while long prompts arrive: mixed batches, either-or, and under a target.

    python -m load.bench.mixed            (SmolLM2 on two old cores: about five minutes)

Three engines with the same token budget, so with the same chunks: `mixed`, `either-or` (mixed: false), and `target`
(mixed, target_itl_ms at --target-steps times the decode step that was measured before). Correctness first: greedy
tokens must be the same in all three. Then --repeats rounds, the engines interleaved: --streams streams run, --prompts
prompts of --prompt tokens arrive one after the other, and every time between two tokens of a stream that overlaps
with them counts. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median, quantiles

from tqdm import tqdm

from load.bench.regime import regime
from load.workloads.words import make_prompts
from minisgl_backend.llm import LLM
from minisgl_backend.text.parameters import SamplingParams

_STREAM_PROMPT_TOKENS = 32
_STREAM_TOKENS = 400  # more than a round needs: the streams are left when the prompts are done
_SETTLED_TOKENS = 3  # of every stream, before the prompts arrive


@dataclass
class Waits:
    """What one engine showed, over all rounds."""

    itl_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)  # of the long prompts


def main() -> None:
    """Runs the cases of the command line."""
    arguments = _parser().parse_args()
    streams = make_prompts(arguments.model, arguments.streams, _STREAM_PROMPT_TOKENS)
    prompts = make_prompts(arguments.model, arguments.prompts * arguments.repeats, arguments.prompt)
    with ExitStack() as stack:

        def start(**settings: bool | float) -> LLM:
            return stack.enter_context(_engine(arguments, settings))

        engines = {"mixed": start(mixed=True), "either-or": start(mixed=False)}
        decode_s = measure_decode(engines["mixed"], streams)
        target_s = arguments.target_steps * decode_s
        engines["target"] = start(mixed=True, target_itl_ms=1000 * target_s)
        check_same_answers(list(engines.values()), streams[:2], prompts[0])
        seen = {name: Waits() for name in engines}
        for number in tqdm(range(arguments.repeats), desc="rounds", unit="round"):
            arriving = prompts[number * arguments.prompts : (number + 1) * arguments.prompts]
            for name, engine in engines.items():
                measure_round(engine, streams, arriving, seen[name])
    rows = [describe(name, waits) for name, waits in seen.items()]
    report(rows, decode_s, target_s, vars(arguments))


@contextmanager
def _engine(arguments: argparse.Namespace, settings: dict[str, bool | float]) -> Iterator[LLM]:
    with LLM(
        arguments.model,
        device=arguments.device,
        token_budget=arguments.token_budget,
        max_running=2 * arguments.streams,
        kv_bytes=arguments.kv_bytes,
        fake_step_ms=arguments.fake_step_ms,
        **settings,
    ) as engine:
        yield engine


def measure_decode(engine: LLM, streams: Sequence[str]) -> float:
    """Seconds of a decode step with all streams running: the median time between tokens with nothing else to do."""
    with running(engine, streams) as times_s:
        _read(engine, streams[0], 12)
    return median(later - earlier for one in times_s for earlier, later in pairwise(one[2:]))


def check_same_answers(engines: Sequence[LLM], streams: Sequence[str], prompt: str) -> None:
    """Two streams and a long prompt at once, on each engine: greedy tokens do not depend on how batches are cut."""
    answers = []
    for engine in engines:
        with ThreadPoolExecutor() as pool:
            asked = [pool.submit(_read, engine, text, 16) for text in (*streams, prompt)]
            answers.append([future.result() for future in asked])
    assert all(answer == answers[0] for answer in answers), f"the engines disagree: {answers}"
    assert all(len(tokens) == 16 for tokens in answers[0])


def measure_round(
    engine: LLM, streams: Sequence[str], prompts: Sequence[str], waits: Waits, stream_tokens: int = _STREAM_TOKENS
) -> None:
    """The prompts arrive one after the other while all streams run."""
    with running(engine, streams, stream_tokens) as times_s:
        begin = time.perf_counter()
        for prompt in prompts:
            sent = time.perf_counter()
            _read(engine, prompt, 1)
            waits.ttft_s.append(time.perf_counter() - sent)
        end = time.perf_counter()
    for one in times_s:
        assert len(one) < stream_tokens, "a stream ended before the prompts were done"
        waits.itl_s += [later - earlier for earlier, later in pairwise(one) if later > begin and earlier < end]


@contextmanager
def running(engine: LLM, streams: Sequence[str], stream_tokens: int = _STREAM_TOKENS) -> Iterator[list[list[float]]]:
    """All streams run, settled; when the block ends they are left. Yields each one's times of tokens."""
    times_s: list[list[float]] = [[] for _ in streams]
    settled, leave = threading.Semaphore(0), threading.Event()
    params = SamplingParams(temperature=0.0, max_tokens=stream_tokens, ignore_eos=True)

    def read(index: int) -> None:
        for piece in engine.stream(streams[index], params):
            before = len(times_s[index])
            times_s[index] += [time.perf_counter()] * len(piece.token_ids)
            if before < _SETTLED_TOKENS <= len(times_s[index]):  # a piece may hold several
                settled.release()
            if leave.is_set():
                return

    with ThreadPoolExecutor(len(streams)) as pool:
        reading = [pool.submit(read, index) for index in range(len(streams))]
        try:
            for _ in streams:
                settled.acquire()
            yield times_s
        finally:
            leave.set()
        for future in reading:
            future.result()


def _read(engine: LLM, prompt: str, tokens: int) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return [token for piece in engine.stream(prompt, params) for token in piece.token_ids]


def describe(name: str, waits: Waits) -> dict[str, float | str]:
    """One row of the table and of the last line."""
    percentiles = quantiles(waits.itl_s, n=100, method="inclusive")
    return {
        "engine": name,
        "itl_p50_ms": round(1000 * percentiles[49], 1),
        "itl_p95_ms": round(1000 * percentiles[94], 1),
        "itl_p99_ms": round(1000 * percentiles[98], 1),
        "prompt_ttft_ms": round(1000 * median(waits.ttft_s)),
        "tokens": len(waits.itl_s),
    }


def report(
    rows: Sequence[dict[str, float | str]], decode_s: float, target_s: float, settings: dict[str, object]
) -> None:
    """Prints the table, the two answers, and the last line."""
    for row in rows:
        print("  ".join(f"{key} {value:>9}" for key, value in row.items()))
    by_name = {row["engine"]: row for row in rows}
    ratio = float(by_name["either-or"]["itl_p99_ms"]) / float(by_name["mixed"]["itl_p99_ms"])
    p95_ms = float(by_name["target"]["itl_p95_ms"])
    print(f"a decode step takes {1000 * decode_s:.0f} ms")
    print(f"P99 of mixed is {ratio:.1f} times lower than of either-or (3 are asked for)")
    print(f"P95 under a target of {1000 * target_s:.0f} ms is {p95_ms:.0f} ms")
    print(
        json.dumps(
            {
                "bench": "mixed",
                **regime(),
                **settings,
                "decode_ms": round(1000 * decode_s, 1),
                "target_itl_ms": round(1000 * target_s, 1),
                "p99_ratio": round(ratio, 2),
                "rows": rows,
            }
        )
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="smollm2")
    add("--device", default="auto")
    add("--streams", type=int, default=8)
    add("--prompt", type=int, default=2000, help="tokens of an arriving prompt")
    add("--prompts", type=int, default=2, help="that arrive in a round")
    add("--repeats", type=int, default=2)
    add("--token-budget", type=int, default=256)
    add("--target-steps", type=float, default=3.0, help="target_itl_ms in decode steps")
    add("--kv-bytes", type=int, default=512 << 20)
    add("--fake-step-ms", type=float, default=0.0, help="with --device fake")
    return parser


if __name__ == "__main__":
    main()
