"""What a step is made of, how its result is read, and why a sequence ends."""

from __future__ import annotations

import pytest

from fakes.fake_worker import FAILING_SEED, solo_run
from fakes.scheduler_bench import SchedulerBench
from minisgl_backend.messages.engine import Ended, EndReason
from minisgl_backend.messages.ids import StepId
from minisgl_backend.messages.plan import NO_TOKEN, BatchPlan, StepResult
from minisgl_backend.messages.sampling import GREEDY, Sampling
from minisgl_backend.scheduler.limits import Limits


def bench(*, depth: int = 0, token_budget: int = 20, max_running: int = 4, page_size: int = 4) -> SchedulerBench:
    return SchedulerBench(Limits(max_running, token_budget, page_size, 64, 256), depth=depth)


def test_decode_rows_come_first_then_prompt_chunks_by_arrival_under_one_budget() -> None:
    engine = bench(token_budget=20)
    engine.add([1] * 3, 9)
    engine.step()
    engine.add([2] * 30, 9)
    engine.add([3] * 5, 9)
    plan = engine.plan()
    assert plan is not None
    assert (plan.row_starts, plan.row_lengths, plan.row_samples) == ((3, 0), (1, 19), (1, 0))
    engine.apply()
    plan = engine.plan()
    assert plan is not None
    assert (plan.row_starts, plan.row_lengths, plan.row_samples) == ((4, 19, 0), (1, 11, 5), (1, 1, 1))
    engine.apply()
    engine.finish()


def test_a_prompt_is_cut_to_what_the_decoding_leave_of_the_budget() -> None:
    engine = bench(token_budget=9, max_running=4)
    for number in range(3):
        engine.add([number], 9)
    engine.step()
    engine.add([7] * 13, 1)
    assert engine.row_lengths(3) == [(1, 1, 1, 6), (1, 1, 1, 6), (1, 1, 1, 1)]
    engine.finish()


def test_pages_are_granted_as_their_tokens_are_planned() -> None:
    engine = bench(page_size=4)
    engine.add([1] * 6, 5)
    grants = []
    while engine.scheduler.has_work:
        plan = engine.plan()
        assert plan is not None
        grants.append([len(grant.pages) for grant in plan.grants])
        engine.apply()
    assert grants == [[2], [], [], [1], []], "6 prompt tokens, then one each: positions 6, 7, 8, 9"


def test_the_last_tokens_kv_has_no_place_and_takes_no_page() -> None:
    engine = bench(page_size=4)
    engine.add([1] * 4, 1)
    plan = engine.plan()
    assert plan is not None and plan.grants[0].pages == (0,)
    assert engine.scheduler.gauges().free_pages == 63
    engine.apply()
    engine.finish()


def test_a_stop_token_in_the_last_allowed_place_is_a_stop() -> None:
    tokens, _ = solo_run([5, 6], GREEDY, 8, ())
    last = next(index for index in range(3, 8) if tokens.index(tokens[index]) == index)
    engine = bench()
    id = engine.add([5, 6], last + 1, stop_token_ids=(tokens[last],))
    engine.finish()
    assert engine.life(id).ended is EndReason.STOP
    assert engine.life(id).tokens == tokens[: last + 1], "the stop token is part of the output"


@pytest.mark.parametrize("place", [0, 1])
def test_any_of_several_stop_tokens_ends_a_sequence(place: int) -> None:
    tokens, _ = solo_run([5, 6], GREEDY, 8, ())
    engine = bench()
    stops = tuple(sorted((tokens[2], 1000)))[:: 1 if place else -1]
    id = engine.add([5, 6], 50, stop_token_ids=stops)
    engine.finish()
    assert engine.life(id).ended is EndReason.STOP
    assert engine.life(id).tokens[-1] == tokens[2]


def test_a_row_without_a_token_ends_its_own_sequence_and_no_other() -> None:
    engine = bench()
    good, bad, other = engine.add([1, 2], 3), engine.add([3, 4], 3), engine.add([5, 6], 3)
    assert engine.plan() is not None
    result = engine.worker.run()
    progress = engine.scheduler.apply(StepResult(result.step, (result.tokens[0], NO_TOKEN, result.tokens[2])), 0.0)
    assert progress.sequence_ids == (good, other)
    assert progress.ended == (Ended(bad, EndReason.FAILED),)
    engine.scheduler.check_integrity()
    assert engine.scheduler.gauges().running == 2


def test_nobody_reads_what_a_row_without_a_token_has_read_though_others_left_pages_behind_it() -> None:
    engine = bench(token_budget=40)
    page = engine.limits.page_size
    shared = list(range(2 * page))
    bad = [*shared, *[7] * page, 1]
    failing = (Sampling(0.0, 0, 1.0, FAILING_SEED | seed, 0) for seed in range(100))
    engine.add(bad, 3, sampling=next(one for one in failing if solo_run(bad, one, 3, ()) == ([], "failed")))
    leaving = engine.add([*shared, *[8] * page, 1], 3)
    assert engine.plan() is not None
    engine.abort(leaving)
    assert engine.apply().ended
    assert engine.scheduler.gauges().cached_pages == 3, "what it alone had is given back"
    later = engine.add([*shared, 9], 3)
    plan = engine.plan()
    assert plan is not None and plan.row_starts == (0,), "the prefix is computed anew"
    engine.apply()
    assert engine.life(later).cached_tokens == 0
    engine.finish()


def test_a_sequence_that_fails_later_keeps_the_tokens_it_had() -> None:
    engine = bench()
    for seed in range(6):
        sampling = Sampling(0.0, 0, 1.0, FAILING_SEED | seed, 0)
        engine.add([seed, 1], 40, sampling=sampling)
    engine.finish()
    assert {life.ended for life in engine.lives.values()} == {EndReason.FAILED}
    assert any(life.tokens for life in engine.lives.values())


def test_nothing_is_planned_while_a_step_is_in_flight() -> None:
    engine = bench()
    engine.add([1, 2], 3)
    assert engine.plan() is not None
    engine.add([3, 4], 3)
    assert engine.plan() is None
    engine.apply()
    assert engine.plan() is not None
    engine.apply()
    engine.finish()


def test_a_step_is_in_flight_from_plan_to_apply_and_work_is_there_until_the_last_end() -> None:
    engine = bench()
    seen = [(engine.scheduler.in_flight, engine.scheduler.has_work)]
    for act in (lambda: engine.add([1, 2], 1), engine.plan, engine.apply):
        act()
        seen.append((engine.scheduler.in_flight, engine.scheduler.has_work))
    assert seen == [(False, False), (False, True), (True, True), (False, False)]


def test_a_plan_of_nothing_has_no_number() -> None:
    engine = bench()
    assert engine.plan() is None
    engine.add([1], 1)
    plan = engine.plan()
    assert plan is not None and plan.step == 1
    engine.apply()
    assert engine.plan() is None
    assert engine.scheduler.gauges().steps == 1


def test_a_result_of_another_step_is_a_bug_that_is_noticed() -> None:
    engine = bench()
    engine.add([1], 2)
    assert engine.plan() is not None
    with pytest.raises(AssertionError, match="result of step 2, expected 1"):
        engine.scheduler.apply(StepResult(StepId(2), (3,)), 0.0)


def test_a_result_with_a_token_too_few_is_a_bug_that_is_noticed() -> None:
    engine = bench()
    engine.add([1], 2)
    engine.add([2], 2)
    assert engine.plan() is not None
    with pytest.raises(AssertionError, match="step 1: 1 tokens for 2 rows"):
        engine.scheduler.apply(StepResult(StepId(1), (3,)), 0.0)


def test_the_same_arrivals_give_the_same_plans() -> None:
    def plans() -> list[BatchPlan]:
        engine = bench()
        for number in range(9):
            engine.add([number] * (3 * number + 1), number + 1)
        told = []
        while (plan := engine.plan()) is not None:
            told.append(plan)
            engine.apply()
        return told

    assert plans() == plans()


# ── depth 1: the next step is planned before the last one's tokens are known ─────────────────────────────────────


def test_exactly_max_new_tokens_are_planned_though_none_is_confirmed() -> None:
    engine = bench(depth=1)
    id = engine.add([1, 2], 2)
    assert engine.plan() is not None
    second = engine.plan()
    assert second is not None and second.row_starts == (2,)
    engine.apply()
    assert engine.plan() is None, "both tokens are planned"
    assert engine.life(id).ended is None
    engine.apply()
    assert (len(engine.life(id).tokens), engine.life(id).ended) == (2, EndReason.LENGTH)
    engine.finish()


def test_a_token_computed_after_the_end_is_dropped() -> None:
    tokens, _ = solo_run([5, 6], GREEDY, 1, ())
    engine = bench(depth=1)
    id = engine.add([5, 6], 9, stop_token_ids=(tokens[0],))
    assert engine.plan() is not None and engine.plan() is not None
    assert engine.apply().ended == (Ended(id, EndReason.STOP),)
    late = engine.apply()
    assert (late.sequence_ids, late.tokens, late.ended) == ((), (), ())
    engine.finish()


def test_slot_and_pages_are_handed_out_only_when_the_last_step_that_names_them_is_applied() -> None:
    tokens, _ = solo_run([5, 6], GREEDY, 1, ())
    engine = SchedulerBench(Limits(1, 8, 4, 1, 256), depth=1, early_uploads=True)
    engine.add([5, 6], 3, stop_token_ids=(tokens[0],))
    second = engine.add([7, 8], 3)
    assert engine.plan() is not None and engine.plan() is not None
    engine.apply()
    gauges = engine.scheduler.gauges()
    assert (gauges.running, gauges.free_slots, gauges.free_pages) == (0, 0, 0)
    assert engine.plan() is None, "step 2 still names the slot and the page"
    engine.apply()
    plan = engine.plan()
    assert plan is not None and plan.admissions[0].slot == 0 and plan.grants[0].pages == (0,)
    engine.apply()
    assert len(engine.life(second).tokens) == 1
    engine.finish()
