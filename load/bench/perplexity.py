"""Perplexity of a model under each `quantization`, on a text that comes with Python.

    python -m load.bench.perplexity --quantization int8 int4       (SmolLM2 on two cores: some minutes)

The text is Python's own language reference as `pydoc` brings it (pydoc_data.topics, topics in alphabetical order), cut
into windows that are prompts of their own; every token but the first of a window counts. The numbers come from the
engine's `prompt_logprobs`, so they go through tokenizer, scheduler and runner like any request's. The first run is
always `none`, and the others are told as a ratio to it. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Sequence
from itertools import islice
from pydoc_data.topics import topics
from typing import get_args

from load.bench.regime import regime
from minisgl_backend.config import Quantization
from minisgl_backend.llm import LLM
from minisgl_backend.models.locate import locate_model
from minisgl_backend.text.parameters import SamplingParams
from minisgl_backend.text.tokenizer import Tokenizer

_ASK = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)


def windows_of(tokenizer: Tokenizer, count: int, tokens: int) -> list[list[int]]:
    """The first `count` windows of so many tokens of the text. Raises SystemExit when it has fewer."""
    ids = tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics)), add_special_tokens=False)
    starts = range(0, len(ids) - tokens + 1, tokens)
    if len(starts) < count:
        raise SystemExit(f"the text has {len(starts)} windows of {tokens} tokens")
    return [ids[start : start + tokens] for start in islice(starts, count)]


def perplexity(llm: LLM, windows: Sequence[Sequence[int]]) -> float:
    """exp of the mean of -log p over all tokens that follow another one."""
    total, counted = 0.0, 0
    for window, completion in zip(windows, llm.generate(list(windows), _ASK), strict=True):
        assert completion.prompt_logprobs is not None, "they were asked for"
        for token, told in zip(window[1:], completion.prompt_logprobs[1:], strict=True):
            assert told is not None, "only the first token has none"
            total -= told[token].logprob
            counted += 1
    return math.exp(total / counted)


def main() -> None:
    """Runs each and prints its line."""
    arguments = _parser().parse_args()
    tokenizer = Tokenizer.load(locate_model(arguments.model))
    windows = windows_of(tokenizer, arguments.windows, arguments.window_tokens)
    settings = {"dtype": arguments.dtype, "max_running": 4, "context_tokens": arguments.window_tokens + 1}
    results: dict[str, float] = {}
    for quantization in dict.fromkeys(["none", *arguments.quantization]):
        began_s = time.monotonic()
        with LLM(arguments.model, quantization=quantization, **settings) as llm:
            results[quantization] = perplexity(llm, windows)
        change = results[quantization] / results["none"] - 1.0
        took_s = time.monotonic() - began_s
        print(f"{quantization:5} perplexity {results[quantization]:.4f}  {change:+.2%}  {took_s:.0f} s", flush=True)
    print(
        json.dumps(
            {
                "benchmark": "perplexity",
                "model": arguments.model,
                "dtype": arguments.dtype,
                "tokens": len(windows) * (arguments.window_tokens - 1),
                "text": f"pydoc_data.topics of Python {platform.python_version()}",
                "perplexity": results,
                **regime(),
            }
        )
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m load.bench.perplexity", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", default="smollm2", help="as the setting (%(default)s)")
    add("--dtype", default="fp32", choices=("auto", "bf16", "fp16", "fp32"))
    add("--quantization", nargs="+", default=["int8", "int4"], choices=get_args(Quantization), metavar="METHOD")
    add("--windows", type=int, default=16, metavar="N", help="of the text (%(default)s)")
    add("--window-tokens", type=int, default=1024, metavar="N", help="(%(default)s)")
    return parser


if __name__ == "__main__":
    main()
