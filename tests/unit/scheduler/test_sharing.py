"""What comes into the tree while somebody's prompt is under way, and what of it that one may use."""

from __future__ import annotations

import pytest

from fakes.fake_worker import solo_run
from fakes.scheduler_bench import SchedulerBench
from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.messages.sampling import GREEDY
from minisgl_backend.scheduler.limits import Limits

DEPTHS = pytest.mark.parametrize("depth", [0, 1])
PROMPT = list(range(8))  # two pages to the token: a second one with this prompt computes the last page privately


def one_ahead_with_private_pages(depth: int, budget: int) -> tuple[SchedulerBench, SequenceId, SequenceId]:
    """A sequence has met its page in the tree, so that its long output is not there; another has that as its prompt,
    and is under way behind it. Returns both."""
    engine = SchedulerBench(Limits(2, budget, 4, 64, 256), depth=depth, early_uploads=True)
    first, ahead = engine.add(PROMPT, 9), engine.add(PROMPT, 60)
    while len(engine.life(ahead).tokens) < 40 or engine.life(first).ended is None:
        if engine.plan() is None or not depth:
            engine.apply()
    assert engine.scheduler.gauges().cached_pages < 6
    answer, _ = solo_run(PROMPT, GREEDY, 60, ())
    behind = engine.add([*PROMPT, *answer[:36]], 5)
    while not engine.life(behind).had_a_row:
        if engine.plan() is None or not depth:
            engine.apply()
    return engine, ahead, behind


@DEPTHS
def test_a_prompt_under_way_goes_on_over_the_pages_that_one_who_leaves_was_ahead_with(depth: int) -> None:
    engine, ahead, behind = one_ahead_with_private_pages(depth, 9)  # one decode row, and two pages
    before = engine.scheduler._live[behind].computed
    assert before % 4 == 0 and before < 30
    engine.abort(ahead)
    starts = []
    while engine.life(behind).ended is None:
        plan = engine.plan()
        starts += plan.row_starts if plan is not None else ()
        if plan is None or not depth:
            engine.apply()
    assert 40 in starts and not any(before <= start < 40 for start in starts), f"rows start at {starts}"
    engine.finish()


@DEPTHS
def test_in_the_middle_of_a_page_it_keeps_its_own(depth: int) -> None:
    """Its table would have to change under a step that may be in flight, or have a page in the wrong place."""
    engine, ahead, behind = one_ahead_with_private_pages(depth, 8)  # one decode row, and a page and three quarters
    assert engine.scheduler._live[behind].computed % 4 == 3
    engine.abort(ahead)
    engine.finish()
    assert len(engine.life(behind).tokens) == 5
