"""Pace: prompts get what the target leaves, on machines whose cost the test makes up."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from minisgl_backend.scheduler.pace import Pace

Machine = Callable[[int, int, int], float]
"""(decode rows, prompt tokens, number of the step) → seconds."""

PAGE, BUDGET = 16, 1024


def _cpu(rows: int, tokens: int, step: int) -> float:
    """Two old cores: rows cost much, the first four most."""
    return 0.06 + 0.02 * min(rows, 4) + 0.012 * rows + 0.0045 * tokens


def _gpu(rows: int, tokens: int, step: int) -> float:
    return 0.004 + 0.00001 * rows + 0.00002 * tokens


def _gpu_with_context(rows: int, tokens: int, step: int) -> float:
    """A token of a prompt costs the more, the further it stands in it."""
    return 0.004 + 0.00001 * rows + 0.00002 * tokens * (1 + (step % 30) / 10)


def _gpu_that_slows_down(rows: int, tokens: int, step: int) -> float:
    return _gpu(rows, tokens, step) * (3 if step >= 300 else 1)


def _always(step: int, chance: random.Random) -> tuple[int, int]:
    return 8, 2000


def _now_and_then(step: int, chance: random.Random) -> tuple[int, int]:
    return 8, 2000 if step // 20 % 2 else 0


def _anything(step: int, chance: random.Random) -> tuple[int, int]:
    return chance.randint(1, 64), chance.choice((0, 0, 100, 2000))


def _run(
    pace: Pace, machine: Machine, load: Callable[[int, random.Random], tuple[int, int]], noise: float, steps: int = 600
) -> list[tuple[int, int, float]]:
    """(rows, prompt tokens, seconds) of every step."""
    chance, seen = random.Random(7), []
    for step in range(steps):
        rows, wanted = load(step, chance)
        tokens = min(wanted, pace.prompt_tokens(rows, BUDGET - rows))
        seconds = machine(rows, tokens, step) * max(0.3, 1.0 + chance.gauss(0.0, noise))
        pace.observe(rows, tokens, seconds)
        seen.append((rows, tokens, seconds))
    return seen


def test_without_a_target_prompts_get_the_whole_budget() -> None:
    pace = Pace(None, PAGE)
    pace.observe(8, 500, 100.0)
    assert pace.prompt_tokens(8, BUDGET) == BUDGET


def test_before_the_first_step_a_page_is_let_through() -> None:
    assert Pace(0.1, PAGE).prompt_tokens(8, BUDGET) == PAGE


def test_with_no_stream_to_hold_up_prompts_get_the_whole_budget() -> None:
    pace = Pace(0.001, PAGE)
    pace.observe(0, 500, 10.0)
    assert pace.prompt_tokens(0, BUDGET) == BUDGET


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_a_target_below_a_decode_step_still_lets_a_page_through(noise: float) -> None:
    seen = _run(Pace(0.003, PAGE), _gpu, _always, noise)
    assert all(tokens >= PAGE for _, tokens, _ in seen)
    assert seen[-1][1] == PAGE


def test_what_is_left_of_the_budget_is_never_passed() -> None:
    pace = Pace(10.0, PAGE)
    _run(pace, _gpu, _always, 0.0)
    for left in (1, PAGE, 17, 300):
        assert pace.prompt_tokens(8, left) == left


@pytest.mark.parametrize("load", [_always, _now_and_then, _anything])
@pytest.mark.parametrize(
    ("machine", "target_s"), [(_cpu, 0.6), (_gpu, 0.012), (_gpu_with_context, 0.02), (_gpu_that_slows_down, 0.02)]
)
@pytest.mark.parametrize("noise", [0.03, 0.15])
def test_nineteen_of_twenty_steps_stay_under_the_target(
    load: Callable[[int, random.Random], tuple[int, int]], machine: Machine, target_s: float, noise: float
) -> None:
    seen = _run(Pace(target_s, PAGE), machine, load, noise)[100:]
    sized = [seconds for _, tokens, seconds in seen if tokens > PAGE]
    assert len(sized) > 20
    assert sum(seconds > target_s for seconds in sized) <= 0.05 * len(sized) + 1


@pytest.mark.parametrize(("machine", "target_s"), [(_cpu, 0.6), (_gpu, 0.012)])
def test_most_of_what_the_target_leaves_is_used(machine: Machine, target_s: float) -> None:
    seen = _run(Pace(target_s, PAGE), machine, _always, 0.03)
    best = max(tokens for tokens in range(PAGE, BUDGET - 8) if machine(8, tokens, 0) <= target_s)
    used = [tokens for _, tokens, _ in seen[-100:]]
    assert sum(used) / len(used) > 0.7 * best
    assert max(used) < 1.15 * best


def test_the_first_chunks_grow_by_doubling_at_most() -> None:
    tokens = [tokens for _, tokens, _ in _run(Pace(1.0, PAGE), _gpu, _always, 0.0, steps=20)]
    assert tokens[0] == PAGE
    assert all(later <= 2 * earlier for earlier, later in pairwise(tokens))
    assert tokens[-1] == BUDGET - 8


def test_one_step_out_of_all_proportion_does_not_shrink_the_next_to_a_page() -> None:
    pace = Pace(0.012, PAGE)
    before = _run(pace, _gpu, _always, 0.02)[-1][1]
    pace.observe(8, before, 5.0)
    assert pace.prompt_tokens(8, BUDGET) > before / 2


def test_a_machine_that_became_slow_is_followed_within_ten_steps() -> None:
    pace = Pace(0.02, PAGE)
    seen = _run(pace, _gpu_that_slows_down, _always, 0.02, steps=310)
    assert seen[299][1] > 500
    assert _gpu_that_slows_down(8, pace.prompt_tokens(8, BUDGET), 310) < 0.02


def test_a_clock_that_stands_still_teaches_nothing() -> None:
    pace = Pace(0.1, PAGE)
    pace.observe(8, 100, 0.0)
    assert pace.prompt_tokens(8, BUDGET) == PAGE
    assert pace.predict(8, 100) == 0.0


def test_costs_stay_finite_and_positive_over_a_long_monotonous_run() -> None:
    pace = Pace(0.012, PAGE)
    _run(pace, _gpu, lambda step, chance: (8, 0), 0.1, steps=20_000)
    assert all(0.0 <= cost < 1.0 for cost in pace._cost)
    seen = _run(pace, _gpu, _always, 0.02)
    assert sum(seconds > 0.012 for _, tokens, seconds in seen if tokens > PAGE) <= 0.05 * len(seen)
