"""The same tokens alone, batched, chunked, cached and retracted, at depth 0 and with overlap, in fp32.

The real runner on a tiny random model in fp32, through the engine as users have it (`LLM`, actors inline). Greedy and
seeded draws; prompts that share prefixes, so that the cache matters; pools so small that sequences are retracted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakes.tiny_model import make_tiny_llama
from minisgl_backend.llm import LLM
from minisgl_backend.text.parameters import SamplingParams

NEW_TOKENS = 40
PREFIX = [(7 * place) % 250 + 3 for place in range(37)]
PROMPTS = [
    PREFIX[: 5 + 4 * number] + [(number * 31 + place) % 250 + 3 for place in range(number)] for number in range(9)
]
PARAMS = [
    SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=0.0 if number % 2 else 0.9, seed=number)
    for number in range(len(PROMPTS))
]

BASE: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "executor": "inline", "threads": 1, "context_tokens": 128}
SMALL_POOL = {"kv_bytes": 144 * 1024, "page_size": 4, "max_running": 9, "token_budget": 64}

MODES: dict[str, dict[str, Any]] = {
    "batched": {},
    "batched without a cache": {"prefix_cache": False},
    "chunked": {"token_budget": 20, "max_running": 9, "page_size": 4},
    "either-or": {"mixed": False},
    "pages of one token": {"page_size": 1},
    "retracted": SMALL_POOL,
    "retracted without a cache": {**SMALL_POOL, "prefix_cache": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=128)


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[tuple[int, ...]]:
    """The tokens of each prompt at depth 0, in an engine that has nothing else to do and remembers nothing."""
    with LLM(folder, **{**BASE, "prefix_cache": False, "overlap": False}) as engine:
        return [
            tuple(engine.generate([prompt], params)[0].token_ids)
            for prompt, params in zip(PROMPTS, PARAMS, strict=True)
        ]


@pytest.mark.parametrize("overlap", [False, True], ids=["depth-0", "overlap"])
@pytest.mark.parametrize("mode", MODES)
def test_answers_are_those_of_each_prompt_alone(
    mode: str, overlap: bool, folder: Path, alone: list[tuple[int, ...]]
) -> None:
    with LLM(folder, **{**BASE, **MODES[mode], "overlap": overlap}) as engine:
        for _ in range(2):  # the second time the cache is warm
            answers = engine.generate(PROMPTS, PARAMS)
            assert [tuple(answer.token_ids) for answer in answers] == alone
        stats = engine.stats()
    assert (stats.retractions > 0) == mode.startswith("retracted"), f"{stats.retractions} retractions"
    assert (stats.matched_pages > 0) == MODES[mode].get("prefix_cache", True)
