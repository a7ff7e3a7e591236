"""A step that fails as a whole: memory ran out, or the device had an error (rule 4 of docs/scheduler.md).

The fake worker fails in the worst way: what the step should have written is nonsense, and whoever reads it says so.
"""

from __future__ import annotations

import pytest

from fakes.scheduler_bench import SchedulerBench
from minisgl_backend.messages.engine import Ended, EndReason, Progress
from minisgl_backend.scheduler.limits import Limits

DEPTHS = pytest.mark.parametrize("depth", [0, 1])
NOTHING = Progress((), (), ())


def bench(depth: int, *, max_running: int = 8, token_budget: int = 64) -> SchedulerBench:
    return SchedulerBench(Limits(max_running, token_budget, 4, 64, 256), depth=depth, early_uploads=True)


def numbers(count: int, start: int = 1) -> list[int]:
    return [(start + 5 * place) % 23 for place in range(count)]


def run(engine: SchedulerBench, steps: int) -> None:
    for _ in range(steps):
        if engine.plan() is None or not engine.depth:
            engine.apply()


@DEPTHS
def test_after_a_failed_step_everybody_goes_on_with_the_same_tokens(depth: int) -> None:
    engine = bench(depth)
    ids = [engine.add([*numbers(20), number], 12) for number in range(4)]
    run(engine, 7)
    while engine.plan() is not None:
        pass
    assert engine.fail() == NOTHING, "nobody is told anything: they begin again"
    gauges = engine.scheduler.gauges()
    assert (gauges.waiting, gauges.running, gauges.cached_pages) == (4, 0, 0)
    engine.finish()
    assert all(engine.life(id).ended is EndReason.LENGTH for id in ids)


def test_the_step_that_was_planned_on_top_of_a_failed_one_is_void() -> None:
    """It read what is not there. Whatever the worker says of it is not believed."""
    engine = bench(1)
    ids = [engine.add(numbers(9, start=number), 8) for number in range(3)]
    assert engine.plan() is not None and engine.plan() is not None
    engine.fail()
    assert engine.apply() == NOTHING
    assert all(not engine.life(id).tokens for id in ids)
    engine.finish()


def test_a_void_step_of_newcomers_only_is_void_too_though_the_worker_ran_it() -> None:
    """Step 1 is a prompt's first chunk, step 2 has the rest of it and a newcomer that shares what step 1 wrote."""
    engine = bench(1, token_budget=12)
    engine.add(numbers(12), 1)
    assert engine.plan() is not None
    late = engine.add([*numbers(12), 3], 4)
    assert engine.plan() is not None
    engine.fail()
    assert engine.apply() == NOTHING
    assert not engine.life(late).tokens
    engine.finish()
    assert engine.life(late).ended is EndReason.LENGTH


@DEPTHS
def test_nothing_that_was_cached_before_a_failed_step_is_found_after_it(depth: int) -> None:
    engine = bench(depth)
    engine.add(numbers(17), 1)
    engine.finish()
    engine.add(numbers(17), 5)
    other = engine.add(numbers(17, start=2), 5)
    assert engine.plan() is not None
    engine.fail()
    assert engine.scheduler.gauges().cached_pages == 0
    engine.finish()
    assert engine.life(other).ended is EndReason.LENGTH


@DEPTHS
def test_who_is_alone_in_a_step_that_fails_fails_and_the_next_is_served(depth: int) -> None:
    engine = bench(depth)
    bad = engine.add(numbers(9), 5)
    assert engine.plan() is not None
    assert engine.fail().ended == (Ended(bad, EndReason.FAILED),)
    good = engine.add(numbers(9, start=4), 5)
    engine.finish()
    assert engine.life(good).ended is EndReason.LENGTH


@DEPTHS
def test_a_sequence_that_breaks_every_step_it_is_in_soon_fails_alone(depth: int) -> None:
    """Each failure halves how many run, until the bad one stands alone; the others all get their answers."""
    engine = bench(depth)
    ids = [engine.add(numbers(9, start=number), 6) for number in range(8)]
    bad = ids[3]
    slots: dict[int, set[int]] = {}
    failures = 0
    while engine.scheduler.has_work:
        while (plan := engine.plan()) is not None:
            slots[plan.step] = set(plan.row_slots)
            state = engine.scheduler._live.get(bad)
            slots[plan.step] = {-1} if state is not None and state.slot in plan.row_slots else set()
        if not engine.scheduler.in_flight:
            break
        oldest = min(engine._in_flight)
        if slots[oldest] and engine.life(bad).ended is None:
            engine.fail()
            failures += 1
        else:
            engine.apply()
        assert failures < 30
    engine.finish()
    assert engine.life(bad).ended is EndReason.FAILED
    assert all(engine.life(id).ended is EndReason.LENGTH for id in ids if id != bad)


@DEPTHS
def test_less_is_tried_after_a_failure_and_the_old_measure_comes_back(depth: int) -> None:
    engine = bench(depth, max_running=4, token_budget=32)
    for number in range(4):
        engine.add(numbers(30, start=number), 2)
    plan = engine.plan()
    assert plan is not None and sum(plan.row_lengths) == 32
    engine.fail()
    if depth:
        assert not engine.scheduler.in_flight
    plan = engine.plan()
    assert plan is not None and sum(plan.row_lengths) == 16, "half the budget"
    engine.finish()
    engine.add(numbers(3, start=9), 150)
    engine.finish()
    engine.add(numbers(30, start=11), 1)
    engine.add(numbers(30, start=12), 1)
    plan = engine.plan()
    assert plan is not None and sum(plan.row_lengths) == 32
    engine.finish()


@DEPTHS
def test_an_abort_between_the_failed_step_and_its_answer_is_told_once(depth: int) -> None:
    engine = bench(depth)
    gone, stays = engine.add(numbers(9), 5), engine.add(numbers(9, start=4), 5)
    while engine.plan() is not None:
        pass
    engine.abort(gone)
    engine.fail()
    engine.finish()
    assert engine.life(gone).ended is EndReason.ABORT
    assert engine.life(stays).ended is EndReason.LENGTH


def test_lpm_looks_again_for_what_a_failed_step_took_from_the_cache() -> None:
    engine = SchedulerBench(Limits(2, 20, 2, 40, 60, policy="lpm"))
    engine.add([1, 2, 3, 4, 5], 1)
    engine.step()
    oldest, _ = engine.add([9, 9, 9], 8), engine.add([8, 8, 8], 8)
    engine.step()
    cached = engine.add([1, 2, 3, 4, 6], 1)
    assert engine.plan() is not None
    engine.fail()
    told = len(engine.life(oldest).tokens)
    engine.step()
    assert len(engine.life(oldest).tokens) == told + 1, "nothing is cached any more, so the oldest comes first"
    assert not engine.life(cached).tokens
    engine.finish()


@DEPTHS
def test_who_decodes_alone_in_a_step_that_fails_fails_too(depth: int) -> None:
    engine = bench(depth)
    bad = engine.add(numbers(9), 5)
    engine.step()
    plan = engine.plan()
    assert plan is not None and plan.row_starts == (9,)
    assert engine.fail().ended == (Ended(bad, EndReason.FAILED),)
    engine.finish()
