"""Who gives way when pages run out, and who does not (rules 13 and 14 of docs/scheduler.md)."""

from __future__ import annotations

from typing import Any

from fakes.scheduler_bench import SchedulerBench
from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.scheduler.limits import Limits
from minisgl_backend.scheduler.sequence import NO_SLOT


def careless(depth: int, num_pages: int, *, max_running: int = 3, **choices: Any) -> SchedulerBench:
    """Pages of four tokens, and no room kept for outputs: so pages run out."""
    engine = SchedulerBench(Limits(max_running, 32, 4, num_pages, 60, **choices), depth=depth)
    estimate = engine.scheduler._lives.reserve.estimate
    estimate.share = estimate.ratio = 0.0
    return engine


def runs(engine: SchedulerBench, id: SequenceId) -> bool:
    return engine.scheduler._live[id].slot != NO_SLOT


def test_nobody_is_admitted_in_a_step_that_retracted() -> None:
    engine = careless(0, 6, max_running=2, policy="priority", prefix_cache=False)
    oldest, victim = engine.add([1] * 4, 20), engine.add([2] * 8, 9, priority=1)
    engine.step()
    urgent = engine.add([3], 2)  # lacks a slot
    while (plan := engine.plan()) is not None and not engine.retractions:
        engine.apply()
    assert runs(engine, oldest) and not runs(engine, victim)
    assert plan is not None and plan.admissions == (), "though slot and pages are free now"
    engine.apply()
    assert engine.plan() is not None and runs(engine, urgent)
    engine.apply()
    engine.finish()


def test_who_would_free_nothing_is_passed_over() -> None:
    engine = careless(0, 4, policy="priority")
    prefix = list(range(8))
    oldest = engine.add([*prefix, 9, 9, 9, 9], 8, priority=1)
    holder, sharer = engine.add([7] * 4, 8), engine.add(prefix, 8)
    plan = engine.plan()
    assert plan is not None and plan.row_starts == (0, 0, 8), "the oldest came last, and reads all that the sharer has"
    engine.apply()
    assert engine.plan() is not None
    assert not runs(engine, holder) and runs(engine, sharer) and runs(engine, oldest)
    engine.apply()
    engine.finish()


def test_whose_last_token_is_in_flight_is_passed_over() -> None:
    engine = careless(1, 6, prefix_cache=False)
    oldest, longer, ending = engine.add([1] * 4, 20), engine.add([2] * 4, 20), engine.add([3] * 4, 5)
    assert engine.plan() is not None
    for _ in range(4):
        assert engine.plan() is not None
        engine.apply()
    assert engine.plan() is None, "what the younger one held is named by the step in flight"
    assert runs(engine, ending) and runs(engine, oldest) and not runs(engine, longer)
    engine.apply()
    assert engine.life(ending).ended is not None
    engine.finish()
