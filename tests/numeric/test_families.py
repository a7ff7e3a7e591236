"""Every family against transformers on random weights: logits for every way to cut a sequence, and greedy answers.

Logits are those of torch's kernels; greedy answers are the engine's, which computes with the kernels in C++ wherever it
can and replays its decode steps. The cases are in tests/fakes/family_cases.py; a family is added there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.family_cases import FAMILY_CASES, WINDOW
from fakes.forward import load, logits_of
from fakes.plans import Planner, generate
from minisgl_backend.config import resolve_config
from minisgl_backend.llm import LLM
from minisgl_backend.text.parameters import SamplingParams
from minisgl_backend.worker.build import build_runner

TOLERANCE = 1e-4
LENGTH = 110
CUTS = {
    "prompt": [LENGTH],
    "chunks": [WINDOW - 1, 1, WINDOW + 1, LENGTH - 2 * WINDOW - 1],
    "a chunk longer than the window after one as long": [WINDOW, LENGTH - WINDOW],
    "decode after a prefix": [LENGTH - 4, 1, 1, 1, 1],
}
PROMPT_LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 100)
NUM_NEW = 64
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "fp32",
    "max_running": 8,
    "context_tokens": 256,
    "threads": 1,
    "page_size": 3,
    "kernels": "native",
}
THROUGH_THE_ENGINE = ("ministral_with_windows", "gemma2", "gemma3", "phi3_with_long_factors", "glm4", "gpt_oss")
"""Windows, caps, ropes of two sorts, stretched, interleaved, sinks and experts: what a cached prefix might upset."""


@pytest.fixture(scope="module", params=FAMILY_CASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILY_CASES[request.param].write(tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return reference_of(folder)


def reference_of(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def logits_by(reference: Any, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocab], fp32."""
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0]


def assert_greedy(reference: Any, prompt: list[int], answer: list[int]) -> None:
    """Each token is what transformers finds most likely after the prompt and the tokens before it: its greedy answer,
    by induction. Where its best two logits are closer than the tolerance, either will do.
    """
    best = logits_by(reference, prompt + answer[:-1])[len(prompt) - 1 :]
    chosen = best.gather(1, torch.tensor(answer)[:, None])[:, 0]
    behind = (best.max(dim=1).values - chosen).tolist()
    assert len(answer) == NUM_NEW and max(behind) < TOLERANCE, f"after {len(prompt)} tokens: {behind}"


def some_tokens(length: int, seed: int) -> list[int]:
    return torch.randint(0, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_logits_equal_transformers_for_every_cut_of_a_sequence(folder: Path, reference: Any) -> None:
    tokens = some_tokens(LENGTH, seed=1)
    expected = logits_by(reference, tokens)
    assert expected.std() > 0.5, "a flat reference would hide errors"
    model = load(folder)
    for name, cut in CUTS.items():
        for page_size in (1, 3, 16):
            got = logits_of(model, tokens, cut, page_size, torch.float32)
            torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_greedy_answers_of_a_mixed_batch_are_those_of_transformers(folder: Path, reference: Any) -> None:
    prompts = [some_tokens(length, seed=length) for length in PROMPT_LENGTHS]
    runner = build_runner(resolve_config(SETTINGS), folder)
    try:
        runner.warm_up()
        answers = generate(runner.run, Planner(3, runner.num_pages), prompts, NUM_NEW, chunk_tokens=40)
    finally:
        runner.close()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_greedy(reference, prompt, answer)


@pytest.mark.slow
@pytest.mark.parametrize("name", THROUGH_THE_ENGINE)
def test_greedy_answers_behind_a_cached_prefix_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Through the engine as users have it. The second prompts find what the first left in the prefix cache, cut off
    before, at and behind the window's length.
    """
    folder = FAMILY_CASES[name].write(tmp_path)
    reference = reference_of(folder)
    first = some_tokens(100, seed=5)
    cuts = (WINDOW - 2, WINDOW, 90)
    others = [first[:cut] + some_tokens(9, seed=cut) for cut in cuts]
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
    with LLM(folder, executor="inline", **SETTINGS) as engine:
        answers = engine.generate([first], params) + engine.generate(others, params)
        assert engine.stats().matched_pages >= sum(cut // SETTINGS["page_size"] for cut in cuts)
    for prompt, answer in zip([first, *others], answers, strict=True):
        assert_greedy(reference, prompt, list(answer.token_ids))
