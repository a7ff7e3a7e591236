"""Pages that are shared, met twice, aborted in flight or still named: what random lives hardly meet.

Rules 5 to 14 of docs/scheduler.md. SchedulerBench compares every answer with the solo run, and the tables of the worker
with those that the scheduler counts by.
"""

from __future__ import annotations

import pytest

from fakes.fake_worker import solo_run
from fakes.scheduler_bench import SchedulerBench
from minisgl_backend.messages.engine import EndReason
from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.messages.sampling import GREEDY
from minisgl_backend.scheduler.limits import Limits

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def bench(
    depth: int, *, num_pages: int = 64, max_running: int = 4, token_budget: int = 64, page_size: int = 4
) -> SchedulerBench:
    limits = Limits(max_running, token_budget, page_size, num_pages, 256)
    return SchedulerBench(limits, depth=depth, early_uploads=True)


def numbers(count: int, start: int = 1) -> list[int]:
    return [(start + 5 * place) % 23 for place in range(count)]


def table(engine: SchedulerBench, id: SequenceId) -> list[int]:
    return list(engine.scheduler._live[id].pages)


# ── rule 5 and 6: two who compute the same ───────────────────────────────────────────────────────────────────────────


@DEPTHS
def test_two_of_one_batch_share_the_full_pages_of_their_prompt_and_no_more(depth: int) -> None:
    engine = bench(depth)
    first, second = (engine.add(numbers(10), 5) for _ in range(2))
    plan = engine.plan()
    assert plan is not None and plan.row_lengths == (10, 2), "the second computes its tail only"
    one, other = table(engine, first), table(engine, second)
    assert one[:2] == other[:2] and one[2] != other[2]
    engine.apply()
    engine.finish()
    assert engine.life(second).cached_tokens == 8


@DEPTHS
def test_who_meets_its_own_page_in_the_tree_keeps_its_private_one(depth: int) -> None:
    """Identical greedy answers fill identical pages. The table of the second may not be switched to the tree's page:
    steps in flight would write there, and a table that was uploaded early would change under a step."""
    engine = bench(depth)
    first, second = (engine.add(numbers(10), 20) for _ in range(2))
    tables: dict[SequenceId, list[int]] = {first: [], second: []}
    while engine.life(first).ended is None:
        if engine.plan() is None or not depth:
            engine.apply()
        for id in [id for id in tables if id in engine.scheduler._live]:
            now = table(engine, id)
            assert now[: len(tables[id])] == tables[id], "a table only grows"
            tables[id] = now
    assert not set(tables[first][2:]) & set(tables[second][2:])
    engine.finish()
    assert engine.scheduler.gauges().cached_pages == (10 + 20 - 1) // 4, "every page once, the duplicates are free"


@DEPTHS
@pytest.mark.parametrize("leaves_first", [0, 1])
def test_who_is_left_alone_with_its_copies_brings_what_is_missing_when_it_goes(depth: int, leaves_first: int) -> None:
    engine = bench(depth)
    both = [engine.add(numbers(10), 24) for _ in range(2)]
    while len(engine.life(both[0]).tokens) < 8:
        if engine.plan() is None or not depth:
            engine.apply()
    engine.abort(both[leaves_first])
    engine.finish()
    again = engine.add([*numbers(10), *solo_run(numbers(10), GREEDY, 24, ())[0]], 1)
    engine.finish()
    assert engine.life(again).cached_tokens == (10 + 24 - 1) // 4 * 4


def test_nobody_is_admitted_again_before_its_token_in_flight_has_landed() -> None:
    """Its row would compute that token a second time, and it would be told twice. Somebody urgent has no room, so one
    is preempted under its row; then the urgent one leaves, and there is room and a slot at once."""
    limits = Limits(4, 40, 1, 40, 256, policy="priority", preempt=True)
    engine = SchedulerBench(limits, depth=1, early_uploads=True)
    engine.add(numbers(4), 12)
    preempted = engine.add(numbers(8, start=9), 12, priority=5)
    for _ in range(3):
        engine.plan()
        if len(engine._in_flight) == 2:
            engine.apply()
    urgent = engine.add(numbers(26, start=2), 2)
    assert engine.plan() is not None and engine.retractions == 1
    state = engine.scheduler._live[preempted]
    engine.abort(urgent)
    landing = state.last_step
    while landing in engine._in_flight:
        assert state.slot < 0, "a token of it is in flight"
        if engine.plan() is None:
            engine.apply()
    while state.slot < 0:
        if engine.plan() is None:
            engine.apply()
    engine.finish()
    assert engine.life(preempted).ended is EndReason.LENGTH


def test_a_resumed_sequence_finds_all_that_was_stored_though_tokens_landed_since() -> None:
    """Preempted with tokens in flight, which land while it waits. What it may find is counted with them: of the tokens
    that it knew, the last one's page is found too."""
    limits = Limits(2, 20, 1, 100, 256, policy="priority", preempt=True)
    engine = SchedulerBench(limits, depth=1, early_uploads=True)
    engine.add(numbers(4), 30)
    preempted = engine.add(numbers(8, start=9), 20, priority=5)
    for _ in range(4):
        engine.plan()
        if len(engine._in_flight) == 2:
            engine.apply()
    engine.add(numbers(3, start=2), 2)
    while not engine.retractions:
        engine.plan()
        if not engine.retractions:
            engine.apply()
    state = engine.scheduler._live[preempted]
    assert state.last_step in engine._in_flight, "a token of it is in flight"
    known = state.known
    while state.slot < 0:
        plan = engine.plan()
        if plan is None:
            engine.apply()
    assert plan is not None and plan.row_starts[-1] == known < state.known
    engine.finish()


@DEPTHS
def test_a_resumed_sequence_whose_twin_went_on_still_computes_its_last_token(depth: int) -> None:
    """All that it knows is in the tree, and more: but the logits behind its last token are nowhere."""
    engine = bench(depth, num_pages=24, page_size=1, max_running=2, token_budget=20)
    twin, retracted = (engine.add(numbers(6), 17) for _ in range(2))
    while not engine.retractions:
        if engine.plan() is None or not depth:
            engine.apply()
    state = engine.scheduler._live[retracted]
    while state.slot < 0:
        plan = engine.plan()
        if plan is None or not depth:
            engine.apply()
    assert engine.life(twin).ended is EndReason.LENGTH
    assert plan is not None and (plan.row_starts, plan.row_lengths) == ((state.known - 1 - (not depth),), (1,))
    engine.finish()


# ── rule 9: what a step in flight names ──────────────────────────────────────────────────────────────────────────────


def test_a_page_that_a_step_in_flight_names_is_not_handed_out_though_its_sequence_has_ended() -> None:
    """A's end is seen one step late; its two full pages are in the tree, unlocked, and its third is let go. All three
    are named by step 2. B needs three, and one is free: it gets that one, and waits for the others."""
    stop = solo_run(numbers(9), GREEDY, 1, ())[0]
    engine = bench(1, num_pages=4, page_size=4, token_budget=32)
    engine.add(numbers(9), 3, stop_token_ids=tuple(stop))
    other = engine.add(numbers(11, start=4), 1)
    assert engine.plan() is not None and engine.plan() is not None
    assert engine.apply().ended[0].reason is EndReason.STOP
    engine.plan()
    assert engine.scheduler._live[other].computed == 4, "no more than the free page before step 2 is applied"
    engine.apply()
    assert engine.scheduler.gauges().evicted_pages >= 1
    engine.finish()
    assert engine.life(other).ended is EndReason.LENGTH


@DEPTHS
def test_pages_of_a_chunk_in_flight_are_not_handed_out_after_its_abort(depth: int) -> None:
    engine = bench(depth, num_pages=6, token_budget=12, max_running=2)
    gone = engine.add(numbers(20), 3)
    assert engine.plan() is not None
    engine.abort(gone)
    other = engine.add(numbers(20, start=9), 3)
    plan = engine.plan()
    if depth:  # what is left of the pool may be used; the worker asserts that nothing else is
        assert plan is None or sum(len(grant.pages) for grant in plan.grants) <= 3
    engine.finish()
    assert engine.life(other).ended is EndReason.LENGTH


# ── rule 10: an abort under those who share ──────────────────────────────────────────────────────────────────────────


@DEPTHS
def test_who_shares_the_pages_of_one_that_is_aborted_in_flight_reads_them_all_the_same(depth: int) -> None:
    """The aborted one's row runs: were it taken out of the plan, nobody would compute the pages of the second."""
    engine = bench(depth)
    gone, stays = engine.add(numbers(18), 5), engine.add(numbers(18), 5)
    plan = engine.plan()
    assert plan is not None and plan.row_lengths == (18, 2)
    engine.abort(gone)
    engine.finish()
    assert engine.life(stays).ended is EndReason.LENGTH
    assert engine.life(stays).cached_tokens == 16


@DEPTHS
def test_who_comes_between_the_abort_and_the_run_of_its_row_may_share_its_pages_too(depth: int) -> None:
    engine = bench(depth)
    gone = engine.add(numbers(18), 5)
    assert engine.plan() is not None
    engine.abort(gone)
    late = engine.add([*numbers(18), 1], 5)
    engine.finish()
    assert engine.life(late).cached_tokens == 16, "steps run in order, so the pages are there when they are read"


@DEPTHS
def test_an_aborted_half_of_a_prompt_leaves_only_pages_that_read_right(depth: int) -> None:
    engine = bench(depth, token_budget=12)
    gone = engine.add(numbers(40), 5)
    assert engine.plan() is not None
    if depth:
        assert engine.plan() is not None
    engine.abort(gone)
    late = engine.add(numbers(40), 5)
    engine.finish()
    assert engine.life(late).cached_tokens == (24 if depth else 12)


@DEPTHS
def test_an_aborted_first_of_many_leaves_the_others_their_prefix(depth: int) -> None:
    engine = bench(depth, max_running=8, token_budget=40, num_pages=200)
    ids = [engine.add([*numbers(32), number], 6) for number in range(8)]
    assert engine.plan() is not None
    for id in ids[:3]:
        engine.abort(id)
    engine.finish()
    assert all(engine.life(id).ended is EndReason.LENGTH for id in ids[3:])


# ── rules 13 and 14: room ────────────────────────────────────────────────────────────────────────────────────────────


@DEPTHS
def test_the_oldest_is_never_retracted_and_a_retracted_one_goes_on_with_the_same_tokens(depth: int) -> None:
    """Nothing is learned yet, so a second is let in; but both answers are as long as they may be."""
    engine = bench(depth, num_pages=16, max_running=4)
    ids = [engine.add(numbers(4, start=number), 40) for number in range(4)]
    oldest_went_on = []
    while engine.scheduler.has_work:
        before = {id: len(engine.life(id).tokens) for id in ids}
        live = [id for id in ids if engine.life(id).ended is None]
        if engine.plan() is None or not depth:
            engine.apply()
            oldest_went_on.append(len(engine.life(live[0]).tokens) > before[live[0]])
    engine.finish()
    assert engine.retractions > 0
    assert sum(oldest_went_on) >= len(oldest_went_on) // 2
    assert [len(engine.life(id).tokens) for id in ids] == [40] * 4


@DEPTHS
def test_a_younger_one_that_lacks_a_page_waits_and_takes_none_from_an_older(depth: int) -> None:
    """Seven pages: when the younger needs its fourth, the older has four. It waits until the older one ends."""
    engine = bench(depth, num_pages=7, token_budget=20)
    older, younger = engine.add(numbers(8), 8), engine.add(numbers(7, start=9), 8)
    while engine.life(older).ended is None:
        if engine.plan() is None or not depth:
            engine.apply()
    assert engine.life(younger).had_a_row and len(engine.life(younger).tokens) < 8
    engine.finish()
    assert engine.retractions == 0


@pytest.mark.parametrize(
    ("streams", "num_pages", "prompt_tokens"), [(6, 48, 20), (6, 48, 26), (7, 49, 20), (7, 63, 20)]
)
def test_rows_of_younger_ones_do_not_take_every_page_before_the_oldest_ones_prompt(
    streams: int, num_pages: int, prompt_tokens: int
) -> None:
    """The oldest has the worst priority, so others decode while its prompt is under way. They have learned to hope for
    short answers, which these are not. What a victim frees is just what the rows before the prompt need, twice."""
    limits = Limits(streams + 1, streams + 2, 1, num_pages, 256, policy="priority")
    engine = SchedulerBench(limits)
    for number in range(100):
        engine.add([number % 23], 50, stop_token_ids=tuple(range(23)))
    engine.finish()
    engine.add([(3 * place + 7) % 23 for place in range(prompt_tokens)], 2, priority=9)
    for number in range(streams):
        engine.add([*range(10), number], 20)
    engine.finish()
    assert engine.retractions > 0


@DEPTHS
def test_with_the_full_reserve_nobody_is_ever_retracted(depth: int) -> None:
    limits = Limits(4, 64, 4, 16, 256, reserve="full")
    engine = SchedulerBench(limits, depth=depth, early_uploads=True)
    for number in range(12):
        engine.add(numbers(8, start=number), 10 + 4 * number)
    engine.finish()
    assert engine.retractions == 0


def test_a_need_that_pages_in_quarantine_cover_waits_for_them_and_takes_from_nobody() -> None:
    """Pages of six aborted ones come back with the step in flight. Nothing cached is evicted for what is on its way."""
    engine = bench(1, num_pages=12, max_running=8, token_budget=60)
    engine.add(numbers(17), 1)
    engine.finish()
    assert engine.scheduler.gauges().cached_pages == 4
    gone = [engine.add(numbers(3, start=number), 2) for number in range(6)]
    assert engine.plan() is not None
    for id in gone:
        engine.abort(id)
    assert engine.scheduler.gauges().free_pages == 2, "and six are named by the step"
    other = engine.add(numbers(29, start=13), 2)  # eight pages
    engine.finish()
    assert engine.life(other).ended is EndReason.LENGTH
    assert (engine.scheduler.gauges().evicted_pages, engine.retractions) == (0, 0)
    again = engine.add(numbers(17), 1)
    engine.finish()
    assert engine.life(again).cached_tokens == 16


# ── rule 15: an admission counts what it finds once, and locks it before it makes room ──────────────────────────────


@DEPTHS
def test_making_room_for_a_newcomer_does_not_evict_the_prefix_that_it_came_for(depth: int) -> None:
    """Its prefix is what was used longest ago, and no page is free: the other one goes."""
    engine = bench(depth, num_pages=10)
    wanted, other = numbers(20), numbers(20, start=2)
    for prompt in (wanted, other):
        engine.add(prompt, 1)
        engine.finish()
    assert engine.scheduler.gauges().free_pages == 0
    again = engine.add([*wanted, 1, 2], 1)
    engine.finish()
    assert engine.life(again).cached_tokens == 20


def test_what_a_newcomer_finds_can_not_be_evicted_for_it_as_well() -> None:
    """Twelve pages: five are cached, five will be of one that runs. The newcomer finds the five and needs three more;
    there are two. Counting the five as evictable too would let it in."""
    engine = SchedulerBench(Limits(4, 64, 4, 12, 256, reserve="full"), early_uploads=True)
    prompt = numbers(21)
    engine.add(prompt, 1)
    engine.finish()
    first = engine.add(numbers(9, start=3), 12)  # 20 places
    engine.step()
    second = engine.add(prompt, 12)  # 32 places, 20 of them found
    engine.step()
    assert engine.life(first).had_a_row and not engine.life(second).had_a_row
    engine.finish()
    assert engine.life(second).cached_tokens == 20, "it waited, and nothing that it came for was evicted meanwhile"
