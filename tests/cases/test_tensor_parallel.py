"""What went wrong for others where a model is on several ranks: TP-02, TP-03, TP-04, TP-05.

The ranks are runners in threads of this process, over the shared memory that processes use.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from fakes.family_cases import FAMILY_CASES
from fakes.forward import load, logits_of
from fakes.plans import Planner, generate
from fakes.rank_threads import on_ranks
from fakes.tiny_model import make_tiny_llama
from minisgl_backend.config import resolve_config
from minisgl_backend.distributed.group import RankGroup
from minisgl_backend.distributed.seat import ALONE, Seat, make_memory
from minisgl_backend.errors import ConfigError
from minisgl_backend.messages.plan import BatchPlan, StepResult
from minisgl_backend.messages.sampling import GREEDY, Sampling
from minisgl_backend.models.folder import read_model_spec
from minisgl_backend.models.ranks import check_ranks
from minisgl_backend.worker.build import build_runner
from minisgl_backend.worker.runner import StepRunner
from minisgl_backend.worker.torch_runner import TorchRunner

SETTINGS = {"device": "cpu", "dtype": "fp32", "threads": 1, "max_running": 8, "context_tokens": 512, "page_size": 4}
PROMPTS = [[7, 300, 41, 9], [12, 13], [200] * 9, [5, 6, 7, 8, 9, 10]]


class Ranks:
    """Runners of all ranks, which get the same plans at the same time."""

    def __init__(self, folder: Path, ranks: int) -> None:
        config = resolve_config(SETTINGS)
        memory = make_memory(ranks)
        seats = [Seat(rank, ranks, memory) for rank in range(ranks)] if ranks > 1 else [ALONE]
        self._pool = ThreadPoolExecutor(ranks)
        self.runners: list[StepRunner] = list(self._pool.map(lambda seat: build_runner(config, folder, seat), seats))
        os.close(memory)

    def run(self, plan: BatchPlan) -> StepResult:
        """Of rank 0; the others say the same."""
        results = list(self._pool.map(lambda runner: runner.run(plan), self.runners))
        assert all(result.tokens == results[0].tokens for result in results)
        return results[0]

    def known(self, slot: int, count: int) -> list[list[int]]:
        """The first tokens of a slot, as each rank keeps them."""
        tensors = [runner._slots._tokens for runner in self.runners if isinstance(runner, TorchRunner)]
        return [tensor[slot, :count].tolist() for tensor in tensors]

    def close(self) -> None:
        for runner in self.runners:
            runner.close()
        self._pool.shutdown()


def answers(
    folder: Path, ranks: int, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]
) -> list[list[int]]:
    """200 tokens of each prompt. Every rank has kept the same ones."""
    group = Ranks(folder, ranks)
    try:
        planner = Planner(page_size=4, num_pages=group.runners[0].num_pages)
        told = generate(group.run, planner, prompts, 200, samplings=samplings)
        for slot, prompt in enumerate(prompts):
            known = group.known(slot, len(prompt) + 200)
            assert all(tokens == [*prompt, *told[slot]] for tokens in known)
        return told
    finally:
        group.close()


@pytest.mark.slow
def test_tp_03_ranks_keep_the_same_tokens_at_every_step(tmp_path: Path) -> None:
    """Temperature 1, and greedy over logits that lie close together: nothing is drawn twice."""
    flat = make_tiny_llama(tmp_path / "flat", initializer_range=1e-4)
    samplings = [GREEDY, *(Sampling(1.0, 0, 1.0, seed, 0) for seed in (1, 2, 3))]
    assert len(answers(flat, 2, PROMPTS, samplings)) == 4
    folder = make_tiny_llama(tmp_path / "wide")
    assert answers(folder, 2, PROMPTS, samplings) == answers(folder, 1, PROMPTS, samplings)


@pytest.mark.parametrize("vocab", [320, 321])
def test_tp_02_logits_of_one_two_and_three_rows_are_those_of_one_rank(tmp_path: Path, vocab: int) -> None:
    folder = make_tiny_llama(tmp_path, vocab=vocab)
    tokens = [3, 99, 250]
    for rows in (1, 2, 3):
        whole = logits_of(load(folder), tokens[:rows], [rows], 16, torch.float32)
        for logits in on_ranks(2, partial(_logits, folder, tokens[:rows])):
            torch.testing.assert_close(logits, whole, atol=1e-5, rtol=1e-5)


def _logits(folder: Path, tokens: list[int], group: RankGroup) -> torch.Tensor:
    return logits_of(load(folder, group=group), tokens, [len(tokens)], 16, torch.float32)


@pytest.mark.parametrize("case", ["qwen3", "olmo2"])
def test_tp_04_more_ranks_than_kv_heads_with_norms_of_queries_and_keys(case: str, tmp_path: Path) -> None:
    folder = FAMILY_CASES[case].write(tmp_path)
    assert read_model_spec(folder).num_kv_heads == 2
    tokens = [3, 99, 250, 17, 60]
    whole = logits_of(load(folder), tokens, [3, 2], 4, torch.float32)
    for logits in on_ranks(4, lambda group: logits_of(load(folder, group=group), tokens, [3, 2], 4, torch.float32)):
        torch.testing.assert_close(logits, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("ranks", "fields", "reason"),
    [
        (
            8,
            {"num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 112},
            "28 query heads .* takes 1, 2, 4",
        ),
        (4, {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 96}, "6 KV heads .* takes 1, 2"),
        (2, {"intermediate_size": 129}, "intermediate_size of 129 .* takes 1$"),
    ],
)
def test_tp_05_what_does_not_divide_is_refused_with_what_does(
    tmp_path: Path, ranks: int, fields: dict[str, int], reason: str
) -> None:
    """That all processes are gone then, and with which exit code, is tested in tests/sim/test_processes.py."""
    with pytest.raises(ConfigError, match=f"'tensor_parallel' is {ranks}, but .*{reason}"):
        check_ranks(read_model_spec(make_tiny_llama(tmp_path, **fields)), ranks)
