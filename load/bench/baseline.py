"""Output tokens per second and time to first token at 1 … 32 streams, of the engine alone and through Triton's gRPC.

    python -m load.bench.baseline --streams 1,4,16,32 --dtypes fp32,bf16 --paths llm,triton

Every stream sends one prompt of exactly --input tokens and reads exactly --output tokens (greedy, end tokens ignored).
Correctness first: the answer to one prompt must be the same on every path. Then a warm-up, then --repeats rounds per
case, the cases interleaved; medians are printed, and one JSON line last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from tqdm import tqdm

from load.bench.regime import regime
from load.serving import serving
from load.streams import ask
from minisgl_backend.llm import LLM
from minisgl_backend.models.locate import locate_model
from minisgl_backend.text.parameters import SamplingParams
from minisgl_backend.text.tokenizer import Tokenizer

Round = Callable[[Sequence[str], int], "list[Timing]"]
"""(prompts, output tokens) → one Timing per prompt, all prompts at once."""


@dataclass(frozen=True)
class Timing:
    """One stream, in seconds from the start of its round."""

    first_s: float
    last_s: float
    text: str


def main() -> None:
    """Runs the cases of the command line."""
    arguments = _parser().parse_args()
    prompts = make_prompts(arguments.model, max(arguments.streams), arguments.input)
    rows = []
    for dtype in arguments.dtypes:
        rows += _measure(arguments, dtype, prompts)
    for row in rows:
        print(
            f"{row['dtype']:>5} {row['path']:>7} {row['streams']:>3} streams "
            f"{row['tokens_per_s']:8.1f} tokens/s  TTFT p50 {row['ttft_ms']:8.0f} ms"
        )
    print(json.dumps({"bench": "baseline", **_regime(arguments), "rows": rows}))


def make_prompts(model: str, number: int, tokens: int) -> list[str]:
    """Different texts of exactly `tokens` tokens each: random words, the same at every call."""
    tokenizer = Tokenizer.load(locate_model(model))
    chance = random.Random(0)
    words = ("time", "year", "people", "way", "day", "man", "thing", "life", "child", "world", "school", "group")
    prompts = []
    for _ in range(number):
        text = "The"
        while (length := len(tokenizer.encode(text))) < tokens:
            text += "".join(" " + chance.choice(words) for _ in range(tokens - length))
        assert length == tokens, f"a prompt of {length} tokens instead of {tokens}"
        prompts.append(text)
    return prompts


def _measure(arguments: argparse.Namespace, dtype: str, prompts: list[str]) -> list[dict[str, float | str]]:
    settings = {
        "kv_bytes": arguments.kv_bytes,
        "token_budget": arguments.token_budget,
        "prefix_cache": False,  # every round sends the same prompts, and their prefill is to be measured
    }
    with ExitStack() as stack:
        rounds: dict[str, Round] = {}
        if "llm" in arguments.paths:
            rounds["llm"] = _llm_round(stack.enter_context(LLM(arguments.model, dtype=dtype, **settings)))
        if "triton" in arguments.paths:
            server = stack.enter_context(serving("--model", arguments.model, "--dtype", dtype, **settings))
            rounds["triton"] = _triton_round(server.grpc)
        _check_same_answers(rounds, prompts[0])
        for run in rounds.values():
            run(prompts[: max(arguments.streams)], 4)
        cases = [(path, streams) for streams in arguments.streams for path in rounds]
        seen: dict[tuple[str, int], list[tuple[float, float]]] = {case: [] for case in cases}
        for _ in tqdm(range(arguments.repeats), desc=dtype, unit="round"):
            for path, streams in cases:
                timings = rounds[path](prompts[:streams], arguments.output)
                rate = streams * arguments.output / max(timing.last_s for timing in timings)
                seen[path, streams].append((rate, statistics.median(timing.first_s for timing in timings)))
    return [
        {
            "dtype": dtype,
            "path": path,
            "streams": streams,
            "tokens_per_s": statistics.median(rate for rate, _ in values),
            "ttft_ms": 1000 * statistics.median(first for _, first in values),
        }
        for (path, streams), values in seen.items()
    ]


def _check_same_answers(rounds: dict[str, Round], prompt: str) -> None:
    texts = {path: run([prompt], 32)[0].text for path, run in rounds.items()}
    assert len(set(texts.values())) == 1 and all(texts.values()), f"the paths disagree: {texts}"


def _llm_round(llm: LLM) -> Round:
    def run(prompts: Sequence[str], output: int) -> list[Timing]:
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        timings: list[Timing | None] = [None] * len(prompts)
        start = time.perf_counter()

        def read(index: int) -> None:
            first, text, tokens = 0.0, [], 0
            for piece in llm.stream(prompts[index], params):
                first = first or time.perf_counter() - start
                text.append(piece.text)
                tokens += len(piece.token_ids)
            assert tokens == output
            timings[index] = Timing(first, time.perf_counter() - start, "".join(text))

        threads = [threading.Thread(target=read, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(timings)
        return [timing for timing in timings if timing is not None]

    return run


def _triton_round(url: str) -> Round:
    async def one(prompt: str, output: int, start: float) -> Timing:
        answer = await ask(url, prompt, temperature=0, max_tokens=output, ignore_eos=True)
        assert answer.error is None and answer.reason == "length", answer
        return Timing(answer.times_s[0] - start, answer.times_s[-1] - start, answer.text)

    async def all_of(prompts: Sequence[str], output: int) -> list[Timing]:
        start = time.perf_counter()
        return list(await asyncio.gather(*(one(prompt, output, start) for prompt in prompts)))

    return lambda prompts, output: asyncio.run(all_of(prompts, output))


def _regime(arguments: argparse.Namespace) -> dict[str, object]:
    return {
        "model": arguments.model,
        "input": arguments.input,
        "output": arguments.output,
        "repeats": arguments.repeats,
        **regime(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="smollm2")
    add("--streams", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 16, 32])
    add("--dtypes", type=lambda text: text.split(","), default=["fp32"])
    add("--paths", type=lambda text: text.split(","), default=["llm", "triton"])
    add("--input", type=int, default=128, help="tokens of a prompt")
    add("--output", type=int, default=128, help="tokens of an answer")
    add("--repeats", type=int, default=3)
    add("--kv-bytes", type=int, default=512 << 20)
    add("--token-budget", type=int, default=1024)
    return parser


if __name__ == "__main__":
    main()
