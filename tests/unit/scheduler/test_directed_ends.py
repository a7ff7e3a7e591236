"""How a sequence ends: with an answer, always, and at any of its end tokens (docs/upstream-faults.md 6, 7)."""

from __future__ import annotations

import pytest

from fakes.fake_worker import solo_run
from fakes.scheduler_bench import SchedulerBench
from minisgl_backend.messages.engine import EndReason
from minisgl_backend.messages.sampling import GREEDY
from minisgl_backend.scheduler.limits import Limits

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def bench(depth: int, context_tokens: int = 64, num_pages: int = 64) -> SchedulerBench:
    return SchedulerBench(Limits(4, 24, 4, num_pages, context_tokens), depth=depth, early_uploads=True)


@DEPTHS
@pytest.mark.parametrize(("context_tokens", "num_pages"), [(64, 64), (4096, 16)])
def test_an_over_long_prompt_is_answered_at_once_and_holds_nobody_up(
    depth: int, context_tokens: int, num_pages: int
) -> None:
    """By the context, and by the size of the pool. It comes first, so that whoever waits would wait behind it."""
    engine = bench(depth, context_tokens, num_pages)
    too_long = engine.add([1] * 66, 5)
    assert (engine.life(too_long).tokens, engine.life(too_long).ended) == ([], EndReason.LENGTH)
    other = engine.add([2] * 5, 3)
    engine.finish()
    assert (len(engine.life(other).tokens), engine.life(other).ended) == (3, EndReason.LENGTH)


@DEPTHS
@pytest.mark.parametrize("which", [0, 1, 2])
def test_any_of_several_end_tokens_ends_an_answer_where_it_first_comes(depth: int, which: int) -> None:
    tokens, _ = solo_run([5, 6], GREEDY, 30, ())
    never = [token for token in range(40) if token not in tokens][:2]
    stops = tuple(sorted((tokens[5], *never)))
    stops = stops[which:] + stops[:which]
    engine = bench(depth)
    id = engine.add([5, 6], 50, stop_token_ids=stops)
    engine.finish()
    assert engine.life(id).ended is EndReason.STOP
    assert engine.life(id).tokens == tokens[: tokens.index(tokens[5]) + 1]


@DEPTHS
def test_without_end_tokens_an_answer_runs_to_its_length(depth: int) -> None:
    engine = bench(depth)
    id = engine.add([5, 6], 30)
    engine.finish()
    assert (len(engine.life(id).tokens), engine.life(id).ended) == (30, EndReason.LENGTH)
