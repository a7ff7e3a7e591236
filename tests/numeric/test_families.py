"""Every family against transformers on random weights: logits for every way to cut a sequence, and greedy answers.

The cases are in tests/fakes/family_cases.py; a family is added there.
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
SETTINGS = {"device": "cpu", "dtype": "fp32", "max_running": 8, "context_tokens": 256, "threads": 1, "page_size": 3}


@pytest.fixture(scope="module", params=FAMILY_CASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILY_CASES[request.param].write(tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def logits_by(reference: Any, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocab], fp32."""
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0]


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
    """Each token is what transformers finds most likely after the prompt and the tokens before it: its greedy answer,
    by induction. Where its best two logits are closer than the tolerance, either will do.
    """
    prompts = [some_tokens(length, seed=length) for length in PROMPT_LENGTHS]
    runner = build_runner(resolve_config(SETTINGS), folder)
    try:
        runner.warm_up()
        answers = generate(runner.run, Planner(3, runner.num_pages), prompts, NUM_NEW, chunk_tokens=40)
    finally:
        runner.close()
    for prompt, answer in zip(prompts, answers, strict=True):
        best = logits_by(reference, prompt + answer[:-1])[len(prompt) - 1 :]
        chosen = best.gather(1, torch.tensor(answer)[:, None])[:, 0]
        behind = (best.max(dim=1).values - chosen).tolist()
        assert len(answer) == NUM_NEW and max(behind) < TOLERANCE, f"after {len(prompt)} tokens: {behind}"
