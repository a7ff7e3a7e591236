"""What a worker runs before its first request."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl_backend.attention.step_metadata import describe_step
from minisgl_backend.worker.scratch_plans import warm_up_plans


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
