"""What a worker runs before its first request."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl_backend.attention.step_metadata import describe_step
from minisgl_backend.kernels.gpu.int8 import int8_tile
from minisgl_backend.kernels.gpu.moe import product_tile
from minisgl_backend.kernels.gpu.tiles import cut_tile, row_tile
from minisgl_backend.worker.scratch_plans import prompt_plans, warm_up_plans


@pytest.mark.parametrize("context_tokens", [1, 2, 3, 5, 40, 600, 3000])
def test_the_warm_up_stays_in_its_contexts_and_computes_each_position_that_it_knows(context_tokens: int) -> None:
    known: dict[int, int] = {}
    for plan in warm_up_plans(2, context_tokens, 100, 16, 7):
        known |= {one.slot: len(one.prompt) // 4 for one in plan.admissions}
        for slot, start, length in zip(plan.row_slots, plan.row_starts, plan.row_lengths, strict=True):
            assert length > 0 <= start and start + length <= min(known[slot] + 1, context_tokens)


def test_the_warm_up_runs_all_kernels_of_a_gpus_attention() -> None:
    """They are compiled when they are first launched, which takes seconds."""
    seen = set()
    for plan in warm_up_plans(4, 8192, 2048, 16, 7):
        step = describe_step(np.array(plan.row_starts), np.array(plan.row_lengths), 16, 32).host
        seen |= {name for name in ("decode_rows", "tile_rows", "part_tiles") if len(getattr(step, name))}
    assert seen == {"decode_rows", "tile_rows", "part_tiles"}


@pytest.mark.parametrize(
    ("context_tokens", "token_budget", "most"),
    [(1, 64, 0), (2, 64, 5), (900, 2048, 2048), (900, 1 << 20, 4495), (9000, 3000, 3000)],
)
def test_prompts_of_the_warm_up_meet_every_tile_that_a_step_can_have(
    context_tokens: int, token_budget: int, most: int
) -> None:
    """Of five sequences at most."""
    plans = prompt_plans(5, context_tokens, token_budget, 16, 7)
    assert all(len(set(plan.row_slots)) == len(plan.row_slots) <= 5 for plan in plans)
    assert all(0 < length < context_tokens for plan in plans for length in plan.row_lengths)
    lengths = [sum(plan.row_lengths) for plan in plans]
    assert max(lengths, default=0) == most
    for tile_of in (
        lambda tokens: product_tile(8 * tokens, 128, 2),
        lambda tokens: product_tile(2 * tokens, 8, 2),
        lambda tokens: int8_tile(tokens, 4096, 2),
        lambda tokens: row_tile(tokens, 4096),
        lambda tokens: row_tile(tokens * 48, 128),
        lambda tokens: cut_tile(tokens, 12288),
    ):
        assert {tile_of(tokens) for tokens in lengths} == {tile_of(tokens) for tokens in range(1, most + 1)}
