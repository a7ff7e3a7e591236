"""The rules of overlap (docs/upstream-faults.md 1 to 4): a step is planned before the tokens of the last are known.

The fifth, that nobody is sent anything before all have answered, is in tests/unit/actors/test_handshake.py. `make
mutation` reverts each rule and shows that its test here fails.
"""

from __future__ import annotations

import pytest

from fakes.fake_worker import solo_run
from fakes.scheduler_bench import SchedulerBench
from minisgl_backend.messages.engine import Ended, EndReason, Progress
from minisgl_backend.messages.sampling import GREEDY
from minisgl_backend.scheduler.limits import Limits


def overlapped(max_running: int = 4, token_budget: int = 20, page_size: int = 4, num_pages: int = 64) -> SchedulerBench:
    limits = Limits(max_running, token_budget, page_size, num_pages, 256)
    return SchedulerBench(limits, depth=1, early_uploads=True)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 8])
def test_fault_1_exactly_max_tokens_are_planned_and_told_though_the_count_runs_ahead(max_new_tokens: int) -> None:
    engine = overlapped()
    id = engine.add([1, 2], max_new_tokens)
    rows = 0
    told: list[tuple[int, bool]] = []
    while engine.scheduler.has_work:
        while (plan := engine.plan()) is not None:
            rows += len(plan.row_slots)
        progress = engine.apply()
        told.append((len(progress.tokens), bool(progress.ended)))
    assert rows == max_new_tokens, "no row is computed for nothing"
    assert told == [(1, False)] * (max_new_tokens - 1) + [(1, True)], "the end comes with the last token, not before"
    assert engine.life(id).ended is EndReason.LENGTH
    engine.finish()


def test_fault_2_a_token_computed_after_the_end_is_dropped_and_brings_nothing_back() -> None:
    tokens, _ = solo_run([5, 6], GREEDY, 3, ())
    engine = overlapped()
    id = engine.add([5, 6], 99, stop_token_ids=(tokens[2],))
    other = engine.add([7, 8], 9)
    late: list[Progress] = []
    while engine.life(other).ended is None:
        while engine.plan() is not None:
            pass
        progress = engine.apply()
        if engine.life(id).ended is not None and Ended(id, EndReason.STOP) not in progress.ended:
            late.append(progress)
    assert engine.life(id).tokens == tokens[: tokens.index(tokens[2]) + 1]
    assert late and all(id not in progress.sequence_ids for progress in late)
    assert not late[0].started and id not in engine.scheduler._live
    engine.finish()


def test_fault_3_slot_and_pages_are_handed_out_only_when_the_last_step_that_names_them_is_applied() -> None:
    """One slot. The end is seen one step late, while a step with a row for the ended sequence runs: the next sequence,
    whose prompt is longer, would have a token of it overwritten."""
    tokens, _ = solo_run([5, 6], GREEDY, 1, ())
    engine = overlapped(max_running=1, token_budget=16, num_pages=3)
    engine.add([5, 6], 3, stop_token_ids=(tokens[0],))
    longer = engine.add([7, 8, 9, 10, 11, 12], 3)
    assert engine.plan() is not None and engine.plan() is not None
    assert len(engine.apply().ended) == 1
    assert engine.plan() is None, "step 2 still names the only slot"
    assert engine.scheduler.gauges().free_slots == 0
    engine.apply()
    plan = engine.plan()
    assert plan is not None and plan.admissions[0].slot == 0
    engine.finish()
    assert engine.life(longer).ended is EndReason.LENGTH


@pytest.mark.parametrize("chunks_in_flight", [1, 2])
def test_fault_4_an_abort_of_a_prompt_in_flight_releases_it_once(chunks_in_flight: int) -> None:
    engine = overlapped(max_running=2, token_budget=8, num_pages=16)
    id = engine.add([1] * 30, 5)
    for _ in range(chunks_in_flight):
        assert engine.plan() is not None
    engine.abort(id)
    assert engine.scheduler.abort(id) == Progress((), (), ()), "the second time it is nobody's"
    engine.scheduler.check_integrity()
    gauges = engine.scheduler.gauges()
    assert gauges.free_slots == 1, "its slot waits for the steps in flight"
    for _ in range(chunks_in_flight):
        assert engine.apply() == Progress((), (), ())
    assert engine.scheduler.gauges().free_slots == 2
    engine.finish()


def test_fault_4_an_abort_between_the_end_and_its_late_token_changes_nothing() -> None:
    tokens, _ = solo_run([5, 6], GREEDY, 1, ())
    engine = overlapped()
    id = engine.add([5, 6], 9, stop_token_ids=(tokens[0],))
    assert engine.plan() is not None and engine.plan() is not None
    engine.apply()
    assert engine.scheduler.abort(id) == Progress((), (), ())
    engine.apply()
    engine.finish()
