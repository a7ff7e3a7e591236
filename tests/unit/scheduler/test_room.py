"""Room: what is clipped, what is admitted, who waits. The numbers are those of faults found in other engines."""

from __future__ import annotations

from typing import Literal

import pytest

from fakes.scheduler_bench import SchedulerBench
from minisgl_backend.messages.engine import EndReason
from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.scheduler.limits import Limits


def bench(
    *,
    page_size: int = 16,
    num_pages: int = 128,
    context_tokens: int = 4096,
    max_running: int = 4,
    token_budget: int = 0,
    reserve: Literal["learned", "full"] = "full",
) -> SchedulerBench:
    budget = token_budget or max_running + page_size + 256
    return SchedulerBench(Limits(max_running, budget, page_size, num_pages, context_tokens, reserve=reserve))


def outcome(engine: SchedulerBench, id: SequenceId) -> tuple[int, EndReason | None]:
    life = engine.lives[id]
    return len(life.tokens), life.ended


@pytest.mark.parametrize("max_tokens", range(2000, 2049))
def test_a_tiny_prompt_whose_max_tokens_nearly_fills_the_pool_is_admitted(max_tokens: int) -> None:
    engine = bench(num_pages=2048 // 16)
    id = engine.add(range(12), max_tokens)
    plan = engine.plan()
    assert plan is not None and plan.row_lengths == (12,)
    assert engine.scheduler._live[id].total_tokens == 12 + min(max_tokens, 2037)
    engine.apply()
    engine.abort(id)
    engine.finish()


def test_an_output_may_fill_the_pool_to_the_last_token_whose_own_kv_is_never_stored() -> None:
    engine = bench(page_size=2, num_pages=8)
    id = engine.add(range(3), 100)
    engine.finish()
    assert outcome(engine, id) == (16 - 3 + 1, EndReason.LENGTH)


def test_a_prompt_that_can_never_fit_is_answered_at_once_and_blocks_nobody() -> None:
    engine = bench(page_size=10, num_pages=100)
    too_long = engine.add([1] * 1500, 10)
    assert outcome(engine, too_long) == (0, EndReason.LENGTH)
    small = engine.add([2] * 10, 5)
    clipped = engine.add([3] * 900, 500)
    engine.finish()
    assert outcome(engine, small) == (5, EndReason.LENGTH)
    assert outcome(engine, clipped) == (101, EndReason.LENGTH)


def test_a_prompt_of_exactly_the_pool_yields_one_token() -> None:
    engine = bench(page_size=4, num_pages=5)
    fits, too_long = engine.add(range(20), 7), engine.add(range(21), 7)
    engine.finish()
    assert outcome(engine, fits) == (1, EndReason.LENGTH)
    assert outcome(engine, too_long) == (0, EndReason.LENGTH)


@pytest.mark.parametrize(("page_size", "num_pages", "context_tokens"), [(16, 128, 100), (4, 25, 4096)])
def test_limits_that_are_no_multiple_of_anything_hold_exactly(
    page_size: int, num_pages: int, context_tokens: int
) -> None:
    """A context of 100 tokens, or a pool of 100: the pool's last token needs no place, so it gives one more."""
    one_more = 1 if context_tokens > 100 else 0
    engine = bench(page_size=page_size, num_pages=num_pages, context_tokens=context_tokens)
    sixty, one, refused = engine.add([1] * 40, 60), engine.add([2] * 99, 1), engine.add([3] * (100 + one_more), 1)
    beyond, neighbour = engine.add([4] * 99, 50), engine.add([5] * 7, 9)
    engine.finish()
    assert outcome(engine, sixty) == (60, EndReason.LENGTH)
    assert outcome(engine, one) == (1, EndReason.LENGTH)
    assert outcome(engine, refused) == (0, EndReason.LENGTH)
    assert outcome(engine, beyond) == (1 + one_more, EndReason.LENGTH)
    assert outcome(engine, neighbour) == (9, EndReason.LENGTH)


def test_one_sequence_that_fills_the_pool_alone_ends_with_its_text_and_the_next_is_served() -> None:
    engine = bench(page_size=8, num_pages=75)
    greedy = engine.add([1] * 100, 1000)
    small = engine.add([2] * 5, 3)
    engine.finish()
    assert outcome(engine, greedy) == (501, EndReason.LENGTH)
    assert outcome(engine, small) == (3, EndReason.LENGTH)


def test_a_prompt_over_the_context_by_one_token_is_answered_without_a_step() -> None:
    engine = bench(context_tokens=64)
    id = engine.add(range(65), 1)
    assert outcome(engine, id) == (0, EndReason.LENGTH)
    assert engine.plan() is None
    assert not engine.scheduler.has_work


def test_the_head_of_the_queue_waits_for_room_and_nobody_overtakes_it() -> None:
    engine = bench(page_size=4, num_pages=8)
    running, big, small = engine.add([1] * 8, 9), engine.add([2] * 20, 5), engine.add([3] * 2, 2)
    engine.step()
    assert engine.scheduler.gauges().running == 1, "two pages would be left for the small one"
    while engine.life(running).ended is None:
        assert not engine.life(big).tokens and not engine.life(small).tokens
        engine.step()
    engine.finish()
    assert outcome(engine, big) == (5, EndReason.LENGTH)
    assert outcome(engine, small) == (2, EndReason.LENGTH)


def test_admission_counts_what_the_running_may_still_take_and_not_what_they_hold() -> None:
    """Four pages, two sequences that hold one page and may take two more: together they would run dry."""
    engine = bench(page_size=4, num_pages=4)
    first, second = engine.add([1] * 4, 8), engine.add([2] * 4, 8)
    plan = engine.plan()
    assert plan is not None and len(plan.admissions) == 1
    assert plan.grants[0].pages == (0,), "pages are taken when their tokens are planned, not at admission"
    engine.apply()
    engine.finish()
    assert outcome(engine, first) == outcome(engine, second) == (8, EndReason.LENGTH)


def test_a_sequence_that_ends_early_gives_its_promise_back() -> None:
    engine = bench(page_size=4, num_pages=4)
    first, second = engine.add([1] * 4, 12), engine.add([2] * 4, 12)
    engine.step()
    engine.step()
    assert not engine.life(second).tokens
    engine.abort(first)
    engine.step()
    assert len(engine.life(second).tokens) == 1
    engine.finish()


def test_not_more_run_than_there_are_slots() -> None:
    engine = bench(max_running=2)
    for number in range(5):
        engine.add([number] * 3, 4)
    plan = engine.plan()
    assert plan is not None and len(plan.row_slots) == 2
    gauges = engine.scheduler.gauges()
    assert (gauges.waiting, gauges.running, gauges.free_slots) == (3, 2, 0)
    engine.apply()
    engine.finish()
