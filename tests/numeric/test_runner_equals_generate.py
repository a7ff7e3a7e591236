"""The runner, driven by hand-written plans, against transformers' greedy generate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fakes.plans import Planner, generate
from fakes.tiny_model import make_tiny_llama
from minisgl_backend.config import resolve_config
from minisgl_backend.messages.plan import NO_TOKEN
from minisgl_backend.messages.sampling import GREEDY, Sampling
from minisgl_backend.worker.build import build_runner
from minisgl_backend.worker.runner import StepRunner

PROMPT_LENGTHS = (1, 2, 17, 64, 150, 33)
NUM_NEW = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), num_key_value_heads=1)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 320, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None
        )
        answers.append(whole[0, len(prompt) :].tolist())
    return answers


@pytest.fixture
def runner_of(folder: Path) -> Iterator[Any]:
    runners: list[StepRunner] = []

    def build(model: Path = folder, **settings: Any) -> StepRunner:
        given = {"device": "cpu", "dtype": "fp32", "max_running": 8, "context_tokens": 256, "threads": 1, **settings}
        runner = build_runner(resolve_config(given), model)
        runner.warm_up()
        runners.append(runner)
        return runner

    yield build
    for runner in runners:
        runner.close()


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("chunk_tokens", [5, 64, 1024])
def test_a_batch_of_mixed_lengths_gives_the_tokens_of_generate(
    page_size: int, chunk_tokens: int, runner_of: Any, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    runner = runner_of(page_size=page_size)
    planner = Planner(page_size, runner.num_pages)
    assert generate(runner.run, planner, prompts, NUM_NEW, chunk_tokens=chunk_tokens) == expected


def test_a_sequence_alone_gives_the_tokens_of_generate(
    runner_of: Any, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    runner = runner_of()
    planner = Planner(16, runner.num_pages)
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert generate(runner.run, planner, [prompt], NUM_NEW) == [tokens], "slot 0 lives again for each prompt"


def test_prompt_rows_may_join_while_others_decode(
    runner_of: Any, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    runner = runner_of()
    planner = Planner(16, runner.num_pages)
    for slot, prompt in enumerate(prompts):  # one more sequence per step, its prompt in chunks of 20
        planner.admit(slot, prompt)
        planner.apply(runner.run(planner.plan([(other, 20) for other in range(slot + 1)])))
    while min(len(planner.tokens[slot]) - len(prompt) for slot, prompt in enumerate(prompts)) < NUM_NEW:
        planner.apply(runner.run(planner.plan([(slot, 20) for slot in range(len(prompts))])))
    for slot, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True)):
        assert planner.tokens[slot][len(prompt) : len(prompt) + NUM_NEW] == tokens


def test_a_seeded_sequence_draws_the_same_tokens_in_any_company_and_chunking(
    runner_of: Any, prompts: list[list[int]]
) -> None:
    samplings = [
        Sampling(temperature=0.8, top_k=0, top_p=1.0, seed=11, sample_index=0),
        Sampling(temperature=1.3, top_k=20, top_p=0.9, seed=12, sample_index=0),
        GREEDY,
        Sampling(temperature=1.0, top_k=0, top_p=0.7, seed=13, sample_index=1),
        Sampling(temperature=2.0, top_k=5, top_p=1.0, seed=14, sample_index=0),
        GREEDY,
    ]
    runner = runner_of()
    planner = Planner(16, runner.num_pages)
    together = generate(runner.run, planner, prompts, NUM_NEW, chunk_tokens=13, samplings=samplings)
    for prompt, sampling, tokens in zip(prompts, samplings, together, strict=True):
        assert generate(runner.run, planner, [prompt], NUM_NEW, samplings=[sampling]) == [tokens]


@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_a_sequence_with_broken_numbers_fails_alone_and_leaves_clean_pages(
    attention: str, folder: Path, runner_of: Any, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    """With torch's attention that rests on the pages' being cleared; native kernels leave out what they hide."""
    poison = 319
    broken = make_tiny_llama(tmp_path, num_key_value_heads=1, tie_word_embeddings=False)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone()
    embedding[poison] = float("nan")
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    clean = [
        (prompt, tokens) for prompt, tokens in zip(prompts, expected, strict=True) if poison not in prompt + tokens
    ]
    assert len(clean) >= 3

    runner = runner_of(broken, kv_bytes=0, attention=attention)
    planner = Planner(16, runner.num_pages)
    planner.admit(0, [5] * 30 + [poison] * 10)
    planner.admit(1, clean[0][0])
    result = runner.run(planner.plan([(0, 64), (1, 1024)]))
    assert result.tokens == (NO_TOKEN, clean[0][1][0])
    planner.apply(result)
    # slot 0 lives again on the pages that held the broken keys and values; the others never notice
    assert generate(runner.run, planner, [p for p, _ in clean], NUM_NEW, chunk_tokens=7) == [t for _, t in clean]
