"""The policy `priority` while prompts are under way: who is more urgent goes before them, and nobody starves."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from fakes.scheduler_bench import SchedulerBench
from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.scheduler.limits import Limits
from minisgl_backend.scheduler.order import FAIR_EVERY
from minisgl_backend.scheduler.sequence import NO_SLOT

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def bench(depth: int = 0, *, num_pages: int = 512, budget: int = 32, **choices: Any) -> SchedulerBench:
    limits = Limits(12, budget, 4, num_pages, 1024, policy="priority", **choices)
    return SchedulerBench(limits, depth=depth, early_uploads=True)


def rows_by_id(engine: SchedulerBench) -> dict[SequenceId, int]:
    """Runs a step: how many tokens of each sequence it computed."""
    plan = engine.plan()
    assert plan is not None
    ids = {state.slot: id for id, state in engine.scheduler._live.items()}
    rows = {ids[slot]: length for slot, length in zip(plan.row_slots, plan.row_lengths, strict=True)}
    assert len(rows) == len(plan.row_slots), "one row each"
    engine.apply()
    return rows


@DEPTHS
@pytest.mark.parametrize("preempt", [False, True])
def test_an_urgent_prompt_has_its_first_chunk_before_the_next_one_of_a_long_prompt_under_way(
    preempt: bool, depth: int
) -> None:
    engine = bench(depth, preempt=preempt)
    long = engine.add([1] * 800, 2, priority=5)
    engine.plan()
    if not depth:
        engine.apply()
    urgent = engine.add([2] * 4, 2, priority=1)
    plan = engine.plan()
    assert plan is not None and engine.life(urgent).had_a_row and plan.row_lengths == (4, 28), "in the very next step"
    while engine.scheduler.in_flight:
        engine.apply()
    engine.finish()
    assert engine.retractions == 0 and engine.life(long).tokens


def test_of_equal_urgency_the_prompt_under_way_goes_on_first() -> None:
    engine = bench()
    engine.add([1] * 800, 2, priority=5)
    engine.step()
    same = engine.add([2] * 4, 2, priority=5)
    for _ in range(10):
        engine.step()
    assert not engine.life(same).had_a_row
    engine.finish()


def test_chunks_under_way_get_the_budget_by_urgency_and_not_by_arrival() -> None:
    engine = bench()
    ids = []
    for priority in (5, 3, 1):
        ids.append(engine.add([priority] * 100, 2, priority=priority))
        assert next(iter(rows_by_id(engine))) == ids[-1], "the newest is the most urgent"
    seen: list[SequenceId] = []
    while len(seen) < 3:
        seen += [id for id in rows_by_id(engine) if engine.life(id).tokens and id not in seen]
    assert seen == ids[::-1], "and is the first to be through"
    engine.finish()


@DEPTHS
@pytest.mark.parametrize("target_itl_ms", [0.0, 1.0], ids=["whole budget", "a page a step"])
def test_the_oldest_prompt_has_a_row_at_least_every_second_step_however_much_is_urgent(
    target_itl_ms: float, depth: int
) -> None:
    engine = bench(depth, budget=64, target_itl_ms=target_itl_ms)
    oldest = engine.add([9] * 400, 2, priority=9)
    lengths = []
    for number in range(60):
        engine.add([number % 23] * 100, 2)
        if len(engine._in_flight) > depth:
            engine.apply()
        plan = engine.plan()
        assert plan is not None
        slot = engine.scheduler._live[oldest].slot
        lengths.append(dict(zip(plan.row_slots, plan.row_lengths, strict=True)).get(slot, 0))
        if not engine.life(oldest).had_a_row:
            lengths.clear()
    assert all(max(pair) >= 4 for pair in pairwise(lengths)), lengths
    assert 0 in lengths, "but in the others the urgent ones have all"
    engine.finish()


def test_what_is_kept_for_the_oldest_is_little_when_the_budget_is_large() -> None:
    engine = bench(budget=256)
    oldest = engine.add([9] * 900, 2, priority=9)
    engine.step()
    urgent = engine.add([1] * 900, 2)
    assert rows_by_id(engine) == {urgent: 256}
    assert rows_by_id(engine) == {urgent: 256 - 256 // FAIR_EVERY, oldest: 256 // FAIR_EVERY}
    assert rows_by_id(engine) == {urgent: 256}
    engine.finish()


def test_the_turn_of_the_oldest_does_not_make_urgent_ones_wait_for_a_prompt_under_way() -> None:
    """Of eight admissions one is the oldest's: it too goes before the prompt under way, or all would wait behind it."""
    engine = bench()
    long = engine.add([1] * 1000, 2, priority=5)
    engine.step()
    passed = engine.add([2] * 4, 2, priority=7)
    for number in range(FAIR_EVERY + 2):
        urgent = engine.add([number] * 4, 1)
        engine.step()
        assert engine.life(urgent).had_a_row, f"urgent number {number}"
    assert engine.life(passed).had_a_row and not engine.life(long).tokens
    engine.finish()


def test_room_is_kept_for_the_rest_of_every_prompt_under_way() -> None:
    """Two half read, of 40 pages each; a third of as many would fit beside what they hold, and beside one of them."""
    engine = bench(num_pages=100)
    first = engine.add([1] * 160, 1, priority=5)
    rows_by_id(engine)
    second = engine.add([2] * 160, 1, priority=4)
    assert rows_by_id(engine) == {second: 32}
    reserve = engine.scheduler._lives.reserve
    assert reserve.extend_pages == 2 * (40 - 8)
    third = engine.add([3] * 160, 1, priority=3)
    rows_by_id(engine)
    assert not engine.life(third).had_a_row and engine.scheduler.gauges().free_pages > 40
    engine.finish()
    assert engine.retractions == 0 and engine.life(first).tokens


@DEPTHS
def test_two_half_read_prompts_that_hold_the_same_pages_and_none_of_their_own_give_way_to_the_oldest(
    depth: int,
) -> None:
    """Either alone would free nothing. Were both passed over, nobody could go on: the oldest and they lack a page."""
    limits = Limits(6, 16, 1, 12, 60, policy="priority", target_itl_ms=1.0)  # prompts: a token a step
    engine = SchedulerBench(limits, depth=depth)
    estimate = engine.scheduler._lives.reserve.estimate
    estimate.share = estimate.ratio = -1.0  # a reserve that hopes for too much
    oldest = engine.add([1], 40)
    engine.step()
    twins = [engine.add([3, 3, 3, 0, 1, 2, 4], 2, priority=5)]
    engine.step()
    twins.append(engine.add([3, 3, 3, 0, 1, 2, 4], 2, priority=1))
    while engine.plan() is not None or engine.scheduler.in_flight:
        if engine.scheduler.in_flight:
            engine.apply()
        if engine.retractions:
            break
    assert engine.scheduler._live[oldest].slot != NO_SLOT
    assert all(engine.scheduler._live[id].slot == NO_SLOT for id in twins)
    engine.finish()


def test_nobody_is_preempted_for_one_who_would_not_fit_all_the_same() -> None:
    engine = bench(num_pages=40, preempt=True)
    oldest = engine.add([1] * 100, 40, priority=9)  # 25 pages, never taken from it
    lower = engine.add([2] * 8, 60, priority=5)
    for _ in range(6):
        engine.step()
    large = engine.add([3] * 72, 2)  # 18 pages
    for _ in range(10):
        engine.step()
    assert engine.retractions == 0 and not engine.life(large).had_a_row
    assert all(engine.scheduler._live[id].slot != NO_SLOT for id in (oldest, lower))
    engine.finish()


def test_what_an_urgent_one_shares_with_those_who_would_go_is_not_counted_twice() -> None:
    """Pages that only the lower one has locked are needed by the urgent one itself: they are no room."""
    engine = bench(num_pages=40, preempt=True)
    engine.add([1] * 80, 20, priority=9)  # 20 pages
    engine.step()
    shared = [2] * 40
    engine.add([*shared, 5, 6], 20, priority=5)
    for _ in range(8):
        engine.step()
    lives = engine.scheduler._lives
    urgent = engine.add([*shared, *([7] * 48)], 2)  # ten pages are shared, it needs twelve more
    for _ in range(6):
        engine.step()
    assert engine.retractions == 0 and not engine.life(urgent).had_a_row and lives.running == 2
    engine.finish()
