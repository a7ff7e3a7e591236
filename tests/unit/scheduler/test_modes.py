"""What the settings change: either-or batches, no cache, the reserve, preemption, deadlines, the target for streams."""

from __future__ import annotations

from typing import Any

import pytest

from fakes.scheduler_bench import SchedulerBench
from minisgl_backend.errors import ConfigError
from minisgl_backend.messages.engine import EndReason
from minisgl_backend.scheduler.limits import Limits

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def bench(
    depth: int = 0, *, num_pages: int = 64, max_running: int = 4, budget: int = 24, **modes: Any
) -> SchedulerBench:
    limits = Limits(max_running, budget, 4, num_pages, 256, **modes)
    return SchedulerBench(limits, depth=depth, early_uploads=True)


# ── mixed ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_mixed_steps_carry_decode_rows_and_a_chunk_together() -> None:
    engine = bench()
    engine.add([1, 2], 30)
    engine.step()
    engine.add([3] * 60, 2)
    assert engine.row_lengths(3) == [(1, 23), (1, 23), (1, 14)]
    engine.finish()


def test_without_mixed_batches_a_prompt_stops_the_running_streams_until_it_is_done() -> None:
    engine = bench(mixed=False)
    engine.add([1, 2], 30)
    engine.step()
    engine.add([3] * 60, 2)
    assert engine.row_lengths(4) == [(24,), (24,), (12,), (1, 1)]
    engine.finish()


@DEPTHS
def test_either_or_gives_the_same_answers(depth: int) -> None:
    engine = bench(depth, mixed=False, num_pages=12)
    for number in range(8):
        engine.add([number] * (3 * number + 1), 5 + number)
    engine.finish()


# ── prefix_cache ─────────────────────────────────────────────────────────────────────────────────────────────────


@DEPTHS
def test_without_a_prefix_cache_nothing_is_shared_and_nothing_stays(depth: int) -> None:
    engine = bench(depth, prefix_cache=False)
    for _ in range(3):
        engine.add(range(20), 6)
    engine.finish()
    gauges = engine.scheduler.gauges()
    assert (gauges.free_pages, gauges.cached_pages, gauges.matched_pages) == (64, 0, 0)
    assert engine.worker.prefill_tokens == 60
    assert [life.cached_tokens for life in engine.lives.values()] == [0, 0, 0]


@DEPTHS
def test_found_in_the_cache_is_what_admissions_found_and_not_the_copies_that_came_free(depth: int) -> None:
    engine = bench(depth)
    prompt = range(3 * engine.limits.page_size)
    for _ in range(2):
        engine.add(prompt, 2)
    engine.finish()
    told = sum(life.cached_tokens or 0 for life in engine.lives.values())
    assert told == 2 * engine.limits.page_size, "of three pages, one at least is computed"
    assert engine.scheduler.gauges().matched_pages == 2


@DEPTHS
def test_under_lpm_those_who_wait_gain_by_what_a_running_prompt_brings_into_the_cache(depth: int) -> None:
    engine = bench(depth, max_running=1, policy="lpm")
    shared = list(range(2 * engine.limits.page_size))
    engine.add([*shared, 1], 1)
    other, gains = engine.add([9] * 5, 1), engine.add([*shared, 2], 1)
    while engine.life(gains).ended is None:
        if engine.plan() is None or not depth:
            engine.apply()
    assert engine.life(other).ended is None, "it came first, but nothing of it is cached"
    engine.finish()


# ── reserve ──────────────────────────────────────────────────────────────────────────────────────────────────────


def running_at_once(engine: SchedulerBench, new_tokens: int) -> int:
    for number in range(4):
        engine.add([number] * 4, new_tokens)
    engine.step()
    return engine.scheduler.gauges().running


def test_the_learned_reserve_lets_in_more_when_outputs_were_short_and_less_after_a_retraction() -> None:
    many, few, worst = bench(num_pages=24), bench(num_pages=24), bench(num_pages=24, reserve="full")
    for engine in (many, few, worst):
        for _ in range(200):
            engine.scheduler._lives.reserve.estimate.ended(5, 100)
    for _ in range(40):
        few.scheduler._lives.reserve.estimate.ended(100, 100)
        few.scheduler._lives.reserve.estimate.retracted()
    assert [running_at_once(engine, 61) for engine in (many, few, worst)] == [4, 1, 1]
    for engine in (many, few, worst):
        engine.finish()
    assert worst.retractions == 0


# ── preempt ──────────────────────────────────────────────────────────────────────────────────────────────────────


@DEPTHS
def test_who_is_more_urgent_takes_a_slot_from_the_least_urgent_but_not_from_the_oldest(depth: int) -> None:
    engine = bench(depth, max_running=3, policy="priority", preempt=True)
    oldest = engine.add([1] * 5, 40, priority=9)
    middle, least = engine.add([2] * 5, 40, priority=3), engine.add([3] * 5, 40, priority=7)
    for _ in range(4):
        engine.plan()
        engine.apply()
    urgent = engine.add([4] * 5, 3, priority=1)
    while not engine.life(urgent).had_a_row:
        if engine.plan() is None or not depth:
            engine.apply()
    slots = {id: engine.scheduler._live[id].slot >= 0 for id in (oldest, middle, least)}
    assert slots == {oldest: True, middle: True, least: False}
    engine.finish()
    assert engine.retractions == 1


def test_equal_priorities_do_not_preempt_and_nobody_does_without_the_setting() -> None:
    for modes, priority in (({"preempt": True}, 5), ({}, 1)):
        engine = bench(max_running=2, policy="priority", **modes)
        for number in range(2):
            engine.add([number] * 5, 10, priority=5)
        engine.step()
        engine.add([9] * 5, 3, priority=priority)
        engine.finish()
        assert engine.retractions == 0


def test_the_urgent_one_has_its_row_in_the_very_step_when_nothing_is_in_flight() -> None:
    engine = bench(max_running=2, policy="priority", preempt=True, mixed=False)
    engine.add([1] * 5, 40, priority=5)
    engine.add([2] * 5, 40, priority=5)
    engine.step()
    engine.add([3] * 5, 3, priority=1)
    plan = engine.plan()
    assert plan is not None and len(plan.admissions) == 1
    engine.apply()
    engine.finish()


# ── deadlines ────────────────────────────────────────────────────────────────────────────────────────────────────


@DEPTHS
def test_a_deadline_ends_a_sequence_in_whatever_phase_and_says_so(depth: int) -> None:
    engine = bench(depth, max_running=2, budget=12)
    decoding = engine.add([1] * 4, 40, deadline_s=5.0)
    extending = engine.add([2] * 40, 40, deadline_s=5.0)
    waiting = engine.add([3] * 4, 40, deadline_s=5.0)
    free = engine.add([4] * 4, 3, deadline_s=6.0)
    engine.plan()
    engine.now = 4.9
    engine.apply()
    assert all(engine.life(id).ended is None for id in (decoding, extending, waiting, free))
    engine.plan()
    engine.now = 5.0
    if engine.plan() is None:
        engine.apply()
    engine.plan()
    assert all(engine.life(id).ended is EndReason.DEADLINE for id in (decoding, extending, waiting))
    engine.finish()
    assert engine.life(free).ended is EndReason.LENGTH


def test_a_deadline_that_has_passed_at_arrival_is_answered_at_once() -> None:
    engine = bench()
    engine.now = 10.0
    assert engine.life(engine.add([1], 5, deadline_s=9.0)).ended is EndReason.DEADLINE
    assert not engine.scheduler.has_work


def test_an_ended_sequences_deadline_ends_nobody() -> None:
    engine = bench()
    id = engine.add([1], 2, deadline_s=3.0)
    engine.finish()
    engine.now = 4.0
    assert engine.scheduler.expire(4.0).ended == ()
    assert engine.life(id).ended is EndReason.LENGTH


# ── target_itl_ms ────────────────────────────────────────────────────────────────────────────────────────────────


def test_with_a_target_a_prompt_gets_what_the_measured_cost_leaves() -> None:
    """A device of one millisecond a token and nothing else: ten of them beside a stream, not the whole budget."""
    engine = bench(num_pages=128, budget=200, target_itl_ms=10.0)
    engine.add([1, 2], 100)
    lengths = []
    for step in range(60):
        if step == 30:
            engine.add(range(200), 2)
        plan = engine.plan()
        assert plan is not None
        engine.now += 0.001 * sum(plan.row_lengths)
        lengths.append(sum(plan.row_lengths))
        engine.apply()
    busy = [length for length in lengths[30:] if length > 1]
    assert len(busy) > 15 and sorted(busy)[int(len(busy) * 0.9)] <= 11
    engine.finish()


# ── what does not fit together ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("modes", "says"),
    [
        ({"preempt": True}, "preempt needs the policy 'priority', the policy is 'fcfs'"),
        ({"target_itl_ms": 5.0, "mixed": False}, "target_itl_ms needs mixed"),
    ],
)
def test_modes_that_would_be_ignored_are_refused(modes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Limits(4, 24, 4, 64, 256, **modes)
