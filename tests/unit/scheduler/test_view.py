"""What is told to whoever looks on: rows, pages by owner, the prefix tree, within the bounds that were asked for."""

from __future__ import annotations

import pytest

from fakes.scheduler_bench import SchedulerBench
from minisgl_backend.messages.engine import Look, RunningRow, View, WaitingRow
from minisgl_backend.messages.ids import StepId
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.scheduler.limits import Limits
from minisgl_backend.scheduler.view import StepTimes

ALL = Look(rows=1000, nodes=1000, edge_tokens=0)


def bench(*, max_running: int = 2, token_budget: int = 16, num_pages: int = 64) -> SchedulerBench:
    return SchedulerBench(Limits(max_running, token_budget, 4, num_pages, 256))


def view(engine: SchedulerBench, look: Look = ALL, now: float = 1e6) -> View:
    return engine.scheduler.view(look, now)


def owners(view: View) -> int:
    gauges = view.gauges
    return gauges.free_pages + gauges.cached_pages + view.quarantined_pages


def test_rows_say_where_each_sequence_stands() -> None:
    engine = bench(token_budget=7)
    first, second, third = engine.add([1] * 6, 9), engine.add([2] * 12, 5), engine.add([3] * 4, 3)
    engine.step()
    engine.step()
    told = view(engine)
    assert told.running == (
        RunningRow(second, 12, 0, 0, 5, 2, extending=True),
        RunningRow(first, 6, 0, 2, 9, 2, extending=False),
    )
    assert told.waiting == (WaitingRow(third, 4, 0),)
    assert (told.prompt_tokens, told.hit_tokens) == (18, 0)
    engine.finish()
    assert view(engine).running == view(engine).waiting == ()


def test_what_was_found_in_the_cache_is_told_of_row_and_engine() -> None:
    engine = bench()
    engine.add([*range(9)], 2)
    engine.finish()
    engine.add([*range(9)], 4)
    engine.step()
    told = view(engine)
    assert [row.cached_tokens for row in told.running] == [8]
    assert (told.prompt_tokens, told.hit_tokens) == (18, 8)


def test_the_tree_is_told_from_its_tops_with_what_is_in_use_first() -> None:
    engine = bench()
    for prompt in ([7] * 9, [*range(9)], [*range(4), 50, 51, 52, 53, 54]):
        engine.add(prompt, 1)
        engine.finish()
    engine.add([*range(9)], 4)
    engine.step()
    used, leaf, *others = view(engine, Look(9, 9, 2)).nodes
    assert (used.parent, used.tokens, used.locks, used.unused_s, used.edge) == (0, 4, 1, 0.0, pack_tokens([0, 1]))
    assert (leaf.parent, leaf.locks, leaf.edge) == (used.number, 1, pack_tokens([4, 5]))
    assert [(node.parent, node.tokens, node.edge) for node in others] == [
        (used.number, 4, pack_tokens([50, 51])),
        (0, 8, pack_tokens([7, 7])),
    ]
    assert all(node.unused_s > 0 for node in others) and view(engine).total_nodes == 4


def test_nothing_is_told_of_tokens_unless_it_is_asked_for() -> None:
    engine = bench()
    engine.add([7] * 9, 4)
    engine.step()
    assert {node.edge for node in view(engine).nodes} == {b""}


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_no_more_is_told_than_was_asked_for_and_the_counts_are_whole(rows: int) -> None:
    engine = bench(max_running=4, token_budget=64)
    for number in range(9):
        engine.add([number] * 9, 3)
    engine.step()
    told = view(engine, Look(rows, rows, 0))
    assert (len(told.running), len(told.waiting), len(told.nodes)) == (rows,) * 3
    assert (told.gauges.running, told.gauges.waiting, told.total_nodes) == (4, 5, 4)


def test_looking_changes_nothing_in_any_phase() -> None:
    """The bench proves the scheduler's integrity after each call, and that all come to the right tokens."""
    engine = bench(max_running=3, num_pages=12)
    ids = [engine.add([number % 2] * (3 + number), 12) for number in range(9)]
    engine.abort(ids[4])
    while engine.scheduler.has_work:
        told = view(engine)
        private = told.gauges.total_pages - owners(told)
        assert 0 <= private <= sum(row.pages for row in told.running)
        engine.step()
        assert view(engine) == view(engine)
    engine.finish()
    assert owners(view(engine)) == 12


def test_the_time_of_a_step_is_known_to_a_quarter_of_a_second_and_the_oldest_are_forgotten() -> None:
    times = StepTimes()
    for step in range(1, 40_001):
        times.planned(StepId(step), step * 0.2)
    assert all(step * 0.2 - 0.4 <= times.of(StepId(step)) <= step * 0.2 for step in range(39_000, 40_001))
    assert times.of(StepId(40_000)) - times.of(StepId(1)) > 1_000, "what is older counts as the oldest"
