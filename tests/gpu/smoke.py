"""Smoke test for a GPU: right logits, sixteen streams, tokens per second. Without a GPU it runs dry on a tiny shape.

    python smoke.py OUT_FOLDER [--shape auto|qwen3-0.6b|tiny]      exit 0: all checks passed

The model is random, in the shape of Qwen3-0.6B (as a Llama). Checked first: logits on the device against the torch
reference in fp32 on the CPU, from the same file. Then sixteen requests stream through `LLM`, twice: the first time
warms up. The last line, also in OUT_FOLDER/smoke.json, is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from fakes.forward import load, logits_of
from fakes.random_model import write_random_llama
from minisgl_backend.device.device import Device, open_device
from minisgl_backend.llm import LLM
from minisgl_backend.text.parameters import SamplingParams

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
    },
    "tiny": {"vocab_size": 2000, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 4096},
}

# Of logits whose root mean square is about 1. fp32 differs by the order of sums only; bf16 rounds every activation to
# 8 bits, 28 layers deep, and the largest of millions of errors lies far beyond their root mean square.
TOLERANCES = {
    torch.float32: {"rms": 2e-4, "max": 5e-3},
    torch.bfloat16: {"rms": 4e-2, "max": 2.5e-1},
}

CUTS = {"prompt": [96], "chunks_and_decode": [40, 1, 30, 23, 1, 1]}
STREAMS, NEW_TOKENS = 16, 128


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=["auto", *SHAPES], default="auto")
    options = parser.parse_args()
    device = open_device("auto")
    on_gpu = device.torch_device.type == "cuda"
    shape = options.shape if options.shape != "auto" else ("qwen3-0.6b" if on_gpu else "tiny")
    report: dict[str, Any] = {
        "test": "gpu-smoke" if on_gpu else "gpu-smoke-dry-run",
        "shape": shape,
        "device": device.name,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        say(f"writing a random model ({shape}) for {device.name}")
        write_random_llama(folder, dtype="bfloat16", **SHAPES[shape])
        report["logits"] = compare_logits(folder, device)
        report["memory_metered"] = check_memory(device) if on_gpu else None
        report |= stream_requests(folder)
    failed = [f"{name}: {entry}" for name, entry in report["logits"].items() if not entry["passed"]]
    report["passed"] = not failed and report["answers_complete"] and report["memory_metered"] in (None, True)
    line = json.dumps(report)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "smoke.json").write_text(line + "\n", encoding="utf-8")
    for failure in failed:
        say(f"FAILED {failure}")
    print(line)
    return 0 if report["passed"] else 1


def compare_logits(folder: Path, device: Device) -> dict[str, dict[str, Any]]:
    """fp32 on the CPU against fp32 and bf16 on the device, for a whole prompt and for chunks with decode rows."""
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    length = sum(CUTS["prompt"])
    tokens = torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    say("logits: reference in fp32 on the CPU")
    reference = logits_of(load(folder), tokens, [length], 16, torch.float32)
    results: dict[str, dict[str, Any]] = {}
    for dtype, tolerance in TOLERANCES.items():
        model = load(folder, dtype, str(device.torch_device))
        for cut, lengths in CUTS.items():
            error = logits_of(model, tokens, lengths, 16, dtype).float().cpu() - reference
            rms, largest = error.square().mean().sqrt().item(), error.abs().max().item()
            passed = rms <= tolerance["rms"] and largest <= tolerance["max"]  # False for NaN, too
            name = f"{str(dtype).removeprefix('torch.')} {cut}"
            results[name] = {"rms": rms, "max": largest, "tolerance": tolerance, "passed": passed}
            say(f"logits: {name}: {results[name]}")
        del model
    scale = reference.square().mean().sqrt().item()
    results["reference is not flat"] = {"rms": scale, "passed": 0.5 < scale < 2.0}
    return results


def check_memory(device: Device) -> bool:
    """What sizes the KV pool: the meter of a piece of work."""
    size = 64 << 20
    metered = device.peak_memory_bytes(
        lambda: torch.empty(size, dtype=torch.uint8, device=device.torch_device).zero_() and None
    )
    return metered == size and 0 < device.free_memory_bytes() < device.total_memory_bytes()


def stream_requests(folder: Path) -> dict[str, Any]:
    """Sixteen streams at once through LLM, greedy and seeded, prompts of mixed lengths."""
    say("starting LLM")
    began = time.perf_counter()
    with LLM(model=folder, context_tokens=4096, max_running=STREAMS, token_budget=2048) as llm:
        start_s = time.perf_counter() - began
        say(f"ready after {start_s:.1f} s")
        for attempt in ("warm-up", "measured"):
            began = time.perf_counter()
            with ThreadPoolExecutor(STREAMS) as pool:
                answers = list(pool.map(lambda i: stream_one(llm, i), range(STREAMS)))
            wall_s = time.perf_counter() - began
            say(f"{attempt}: {STREAMS} streams in {wall_s:.2f} s")
    ttft = sorted(answer["ttft_s"] for answer in answers)
    return {
        "streams": STREAMS,
        "new_tokens": NEW_TOKENS,
        "answers_complete": all(a["tokens"] == NEW_TOKENS and a["reason"] == "length" for a in answers),
        "start_s": round(start_s, 2),
        "wall_s": round(wall_s, 3),
        "output_tokens_per_s": round(sum(a["tokens"] for a in answers) / wall_s, 1),
        "ttft_p50_ms": round(ttft[len(ttft) // 2] * 1000, 1),
    }


def stream_one(llm: LLM, index: int) -> dict[str, Any]:
    """One stream to its end: how many tokens, why it ended, seconds to its first token."""
    params = SamplingParams(
        max_tokens=NEW_TOKENS,
        temperature=0.0 if index % 2 else 0.9,
        top_p=0.95 if index % 4 == 0 else 1.0,
        seed=index,
        ignore_eos=True,
    )
    began = time.perf_counter()
    first, tokens, reason = None, 0, None
    for piece in llm.stream("the cat and the hat " * (1 + 4 * index), params):
        if first is None and piece.token_ids:
            first = time.perf_counter() - began
        tokens += len(piece.token_ids)
        reason = piece.finish_reason
    return {"ttft_s": first or 0.0, "tokens": tokens, "reason": reason and str(reason)}


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
