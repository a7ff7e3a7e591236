"""Reported faults of other servers about scheduling, on the scheduler with a page-exact fake model.

SC-01 vllm-project/vllm#39734; SC-02 sgl-project/sglang#28530; SC-04 sgl-project/sglang#32549;
SC-05 sgl-project/sglang#31954; SC-08 sgl-project/mini-sglang PR #68; SC-09 sgl-project/sglang PR #19881;
SC-10 vllm-project/vllm#276. Numbers and edges of SC-01, 02, 08 and 09 are in tests/unit/scheduler/test_room.py.
"""

from __future__ import annotations

import pytest

from fakes.scheduler_bench import SchedulerBench
from minisgl_backend.messages.engine import EndReason
from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.scheduler.limits import Limits
from minisgl_backend.scheduler.order import FAIR_EVERY, Policy

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def outcome(engine: SchedulerBench, id: SequenceId) -> tuple[int, EndReason | None]:
    return len(engine.life(id).tokens), engine.life(id).ended


@DEPTHS
def test_sc_01_what_can_never_fit_is_answered_at_once_and_blocks_nobody(depth: int) -> None:
    engine = SchedulerBench(Limits(4, 300, 10, 100, 4096), depth=depth)
    too_long = engine.add([1] * 1500, 10)
    assert outcome(engine, too_long) == (0, EndReason.LENGTH)
    small, clipped = engine.add([2] * 10, 5), engine.add([3] * 900, 500)
    engine.finish()
    assert outcome(engine, small) == (5, EndReason.LENGTH)
    assert outcome(engine, clipped) == (101, EndReason.LENGTH), "pool - prompt + 1, as docs/scheduler.md says"


@DEPTHS
@pytest.mark.parametrize("max_tokens", [2000, 2030, 2036, 2037, 2048])
def test_sc_02_a_tiny_prompt_whose_max_tokens_nearly_fill_the_pool_runs(max_tokens: int, depth: int) -> None:
    engine = SchedulerBench(Limits(4, 64, 16, 128, 4096), depth=depth)
    id = engine.add([5] * 12, max_tokens, stop_token_ids=tuple(range(23)))
    plan = engine.plan()
    assert plan is not None and plan.row_lengths == (12,)
    engine.finish()
    assert outcome(engine, id) == (1, EndReason.STOP)


@DEPTHS
def test_sc_04_a_long_prompt_does_not_stop_a_running_stream(depth: int) -> None:
    budget = 24
    engine = SchedulerBench(Limits(4, budget, 8, 400, 4096), depth=depth)
    stream = engine.add([1, 2, 3], 120)
    while len(engine.life(stream).tokens) < 50:
        engine.step()
    long = engine.add([4] * (50 * budget), 2)
    gap = longest = 0
    while engine.life(stream).ended is None:
        while engine.plan() is not None and depth:
            pass
        told = engine.apply().sequence_ids
        gap = 0 if stream in told else gap + 1
        longest = max(longest, gap)
        assert not engine.life(long).tokens or engine.life(long).had_a_row
    assert longest == 0, "the stream has a token in every step"
    assert engine.life(long).had_a_row, "and the prompt advances meanwhile"
    engine.finish()


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight", "priority"])
def test_sc_05_a_request_without_a_cached_prefix_is_not_passed_over_for_ever(policy: Policy) -> None:
    """Eight clients that share a prefix and ask again at once; four may run. The cold one has the worst of everything:
    no prefix, the lowest priority. It waits for its turn, and that comes."""
    engine = SchedulerBench(Limits(4, 128, 4, 200, 4096, policy=policy))
    head = [3] * 100
    asked = 0

    def ask() -> SequenceId:
        nonlocal asked
        asked += 1
        return engine.add([*head, asked % 23, asked // 23], 3)

    clients = [ask() for _ in range(8)]
    for _ in range(20):
        engine.step()
        clients = [ask() if engine.life(id).ended else id for id in clients]
    cold = engine.add([9] * 40, 3, priority=100)
    admitted = 0
    while not engine.life(cold).had_a_row:
        plan = engine.plan()
        assert plan is not None
        admitted += len(plan.admissions)
        engine.apply()
        clients = [ask() if engine.life(id).ended else id for id in clients]
        assert admitted <= FAIR_EVERY * 9, "at most eight waited before it"
    engine.finish()


@DEPTHS
def test_sc_08_limits_that_are_no_multiple_of_anything_hold_to_the_token(depth: int) -> None:
    engine = SchedulerBench(Limits(4, 200, 16, 128, 100), depth=depth)
    sixty, one, refused = engine.add([1] * 40, 60), engine.add([2] * 99, 1), engine.add([3] * 100, 1)
    neighbour = engine.add([5] * 7, 9)
    engine.finish()
    assert [outcome(engine, id)[0] for id in (sixty, one, refused, neighbour)] == [60, 1, 0, 9]


@DEPTHS
def test_sc_09_one_sequence_that_fills_the_pool_alone_keeps_its_text_and_the_next_is_served(depth: int) -> None:
    engine = SchedulerBench(Limits(4, 120, 8, 75, 4096), depth=depth)
    greedy, small = engine.add([1] * 100, 1000), engine.add([2] * 5, 3)
    engine.finish()
    assert outcome(engine, greedy) == (501, EndReason.LENGTH)
    assert outcome(engine, small) == (3, EndReason.LENGTH)


def test_sc_10_a_prompt_over_the_limit_by_one_token_is_answered_without_a_step() -> None:
    engine = SchedulerBench(Limits(4, 64, 16, 128, 64))
    id = engine.add([1] * 65, 1)
    assert outcome(engine, id) == (0, EndReason.LENGTH)
    assert engine.plan() is None and not engine.scheduler.has_work
