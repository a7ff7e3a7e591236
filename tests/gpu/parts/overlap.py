"""The whole engine through `LLM`: streams side by side are complete, and planned one step ahead they say the same.

On a GPU with the kernels that it takes by itself; where there is none with torch's, and all else as it is. Two engines
may share the GPU, so their rates are told and not asked for.
"""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fakes.random_model import write_random_llama
from minisgl_backend.llm import LLM
from minisgl_backend.text.parameters import SamplingParams
from tests.gpu.checks import Failed, Found, Place, Report, equal

SHAPES: dict[bool, dict[str, Any]] = {
    True: {  # Qwen3-0.6B as a Llama, a third of its layers
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 9,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
    },
    False: {"vocab_size": 2000, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 4096},
}


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    reason: str
    ttft_s: float


def run(report: Report, place: Place) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"

        def write() -> Found:
            write_random_llama(model, dtype="float32", **SHAPES[not place.dry])
            return None

        if report.check("a random model is written", write):
            for dtype in place.two_dtypes:
                name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
                report.check(f"one ahead = one after another, {name}", partial(_check, place, model, name), needs_s=8)


def _check(place: Place, model: Path, dtype: str) -> Found:
    found: dict[str, Any] = {}
    answers: dict[bool, list[Answer]] = {}
    streams, new = place.pick((16, 96), (4, 12))
    for overlap in (False, True):
        settings: dict[str, Any] = {"overlap": overlap, "dtype": dtype, "context_tokens": 4096, "max_running": streams}
        if not place.dry:
            settings["gpu_memory_utilization"] = 0.2  # another dtype's engine runs beside this one
        else:
            settings |= {"device": "cpu", "kernels": "torch", "threads": 1, "kv_bytes": 64 << 20}
        began = time.perf_counter()
        with LLM(model=model, token_budget=2048, **settings) as llm:
            found[f"start_s_{overlap}"] = round(time.perf_counter() - began, 2)
            with ThreadPoolExecutor(streams) as pool:
                list(pool.map(partial(_stream, llm, 8), range(streams)))  # a warm-up
                began = time.perf_counter()
                answers[overlap] = list(pool.map(partial(_stream, llm, new), range(streams)))
                wall_s = time.perf_counter() - began
        for answer in answers[overlap]:
            equal((len(answer.tokens), answer.reason), (new, "length"), "tokens of a stream and why it ended")
        ttft = sorted(answer.ttft_s for answer in answers[overlap])
        found[f"tokens_per_s_{overlap}"] = round(streams * new / wall_s, 1)
        found[f"ttft_p50_ms_{overlap}"] = round(ttft[len(ttft) // 2] * 1000, 1)
    same = sum(one.tokens == other.tokens for one, other in zip(answers[False], answers[True], strict=True)) / streams
    if same < 1.0 and dtype == "fp32":  # in 16 bits batches that form otherwise round otherwise
        raise Failed(f"{same:.3f} of the answers are the same with and without overlap; {found}")
    return {**found, "same": same}


def _stream(llm: LLM, new: int, index: int) -> Answer:
    """One to its end: prompts of many lengths, greedy and sampled."""
    params = SamplingParams(
        max_tokens=new,
        temperature=0.0 if index % 2 else 0.9,
        top_p=0.95 if index % 4 == 0 else 1.0,
        seed=index,
        ignore_eos=True,
    )
    began = time.perf_counter()
    first, tokens, reason = 0.0, [], ""
    for piece in llm.stream("the cat and the hat " * (1 + 4 * index), params):
        if piece.token_ids and not tokens:
            first = time.perf_counter() - began
        tokens += piece.token_ids
        reason = str(piece.finish_reason or reason)
    return Answer(tuple(tokens), reason, first)
