"""Whole tiny models on our GPU kernels: attention, layers and experts, through the runner. Their tokens are torch's."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from fakes.plans import Planner, generate
from load.bench.gpu_models import CONFIGS, DeviceRandom
from load.bench.gpu_stand import PAGE_TOKENS, Stand
from minisgl_backend.attention.torch_backend import TorchAttention
from minisgl_backend.device.cpu import CpuDevice
from minisgl_backend.kvpool.paged import KvShape, PagedKvPool
from minisgl_backend.messages.sampling import GREEDY, Sampling
from minisgl_backend.models.load import build_decoder
from minisgl_backend.sampling.grammar import GrammarSlots
from minisgl_backend.worker.torch_runner import TorchRunner, attention_variants

PROMPTS = ([5, 9, 2, 400, 17, 3, 77], [3], [8, 8, 120, 14, 61, 250, 9, 9, 4, 31, 6, 2, 90, 7, 7, 44, 1, 5])
SAMPLED = Sampling(temperature=0.9, top_k=20, top_p=0.9, seed=5, sample_index=0)
NEW = 2
CONTEXT = 48
PAGES = 12


@dataclass(frozen=True)
class Tokens:
    """What both gave for the same plans."""

    ours: list[list[int]]
    torchs: list[list[int]]


def both(name: str, chunk_tokens: int, samplings: list[Sampling], *, recorded: bool = False) -> Tokens:
    """All prompts together: prompts in chunks beside decode rows, then decode rows alone. fp32."""
    device = CpuDevice(1)
    stand = Stand(CONFIGS[name], device, torch.float32, pages=PAGES, context_tokens=CONTEXT, layers=1)
    graphs = stand.graphs((1, 2, 3), tell=lambda line: None) if recorded else None
    runners = (stand.runner(graphs, max_running=3, token_budget=64), torchs_runner(stand, device))
    made = [
        generate(runner.run, Planner(PAGE_TOKENS, PAGES), PROMPTS, NEW, chunk_tokens=chunk_tokens, samplings=samplings)
        for runner in runners
    ]
    return Tokens(*made)


def torchs_runner(stand: Stand, device: CpuDevice) -> TorchRunner:
    """Of the same weights."""
    spec, to = stand.spec, torch.device("cpu")
    model = build_decoder(spec, DeviceRandom(spec, to, torch.float32), to, torch.float32, CONTEXT)
    pool = PagedKvPool(
        KvShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, torch.float32), PAGES, PAGE_TOKENS, to
    )
    return TorchRunner(
        model,
        device,
        pool,
        attention=TorchAttention(pool, attention_variants(spec)),
        max_running=3,
        context_tokens=CONTEXT,
        token_budget=64,
        grammars=GrammarSlots(tuple, spec.vocab_size),
    )


@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_prompts_in_chunks_beside_decode_rows_give_the_tokens_of_torch(name: str) -> None:
    tokens = both(name, 8, [GREEDY, SAMPLED, GREEDY])
    assert tokens.ours == tokens.torchs
    assert len({token for row in tokens.ours for token in row}) > 3, "a model that says the same whatever it is asked"


def test_whole_prompts_and_recorded_steps_give_the_tokens_of_torch() -> None:
    tokens = both("tiny", 1 << 20, [SAMPLED, GREEDY, GREEDY], recorded=True)
    assert tokens.ours == tokens.torchs
