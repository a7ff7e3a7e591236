"""The small parts of the scheduler by themselves: what outputs really take, caution after failures, who is oldest."""

from __future__ import annotations

import pytest

from minisgl_backend.messages.engine import Sequence
from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.messages.sampling import GREEDY
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.scheduler.caution import Caution
from minisgl_backend.scheduler.estimate import OutputEstimate
from minisgl_backend.scheduler.limits import Limits
from minisgl_backend.scheduler.running import Running, all_youngest_first
from minisgl_backend.scheduler.sequence import SequenceState


def arrived(arrival: int, prompt: range = range(9)) -> SequenceState:
    sequence = Sequence(SequenceId(100 - arrival), pack_tokens(prompt), GREEDY, 20, ())
    return SequenceState(sequence, 20, 4, arrival)


# ── the estimate ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_share_follows_what_outputs_were_of_what_was_asked() -> None:
    estimate = OutputEstimate()
    for _ in range(300):
        estimate.ended(25, 100)
    assert estimate.share == pytest.approx(0.25, abs=0.01)
    for _ in range(300):
        estimate.ended(90, 100)
    assert estimate.share == pytest.approx(0.9, abs=0.01)


def test_a_retraction_keeps_more_room_and_quiet_times_less_within_bounds() -> None:
    estimate = OutputEstimate()
    before = estimate.ratio
    estimate.retracted()
    assert estimate.ratio > before
    for _ in range(1000):
        estimate.retracted()
    assert estimate.ratio == 1.0, "never more than the worst case"
    for _ in range(1000):
        estimate.ended(100, 100)
    assert 0.2 < estimate.ratio < 0.3, "never nothing"


# ── caution ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_failure_halves_what_is_tried_down_to_one_sequence_and_calm_brings_it_back() -> None:
    limits = Limits(max_running=8, token_budget=100, page_size=4, num_pages=9, context_tokens=99)
    caution = Caution(limits)
    seen = [(caution.max_running, caution.token_budget)]
    for _ in range(6):
        caution.failed()
        seen.append((caution.max_running, caution.token_budget))
    assert seen == [(8, 100), (4, 50), (2, 25), (1, 12), (1, 6), (1, 5), (1, 5)]
    for _ in range(64 * caution.level):
        caution.applied()
    assert (caution.level, caution.max_running, caution.token_budget) == (0, 8, 100)


def test_a_failure_restarts_the_time_of_calm() -> None:
    caution = Caution(Limits(8, 100, 4, 9, 99))
    caution.failed()
    for _ in range(63):
        caution.applied()
    caution.failed()
    for _ in range(63):
        caution.applied()
    assert caution.level == 2
    caution.applied()
    assert caution.level == 1


def test_a_failure_when_less_can_not_be_tried_restarts_the_time_of_calm_too() -> None:
    caution = Caution(Limits(2, 6, 4, 64, 256))
    caution.failed()
    assert (caution.level, caution.max_running, caution.token_budget) == (1, 1, 5)
    for _ in range(63):
        caution.applied()
    caution.failed()
    caution.applied()
    assert caution.level == 1


# ── who runs, by arrival ─────────────────────────────────────────────────────────────────────────────────────────


def test_the_running_are_by_arrival_whatever_the_order_in_which_they_came_in() -> None:
    running = Running()
    states = {arrival: arrived(arrival) for arrival in range(1, 8)}
    for arrival in (3, 1, 7, 2, 5):
        running.add(states[arrival])
    running.remove(states[7])
    running.add(states[4])
    assert [state.arrival for state in running.by_arrival()] == [1, 2, 3, 4, 5]
    assert [state.arrival for state in running.youngest_first()] == [5, 4, 3, 2, 1]
    oldest = running.oldest()
    assert oldest is states[1] and len(running) == 5


def test_the_youngest_of_two_groups_come_first() -> None:
    one, other = Running(), Running()
    for arrival in (1, 4, 6):
        one.add(arrived(arrival))
    for arrival in (2, 3, 5):
        other.add(arrived(arrival))
    assert [state.arrival for state in all_youngest_first(one, other)] == [6, 5, 4, 3, 2, 1]
    assert Running().oldest() is None


# ── the tokens of a page ─────────────────────────────────────────────────────────────────────────────────────────


def test_the_key_of_a_page_reaches_over_what_was_known_and_what_came_since() -> None:
    state = arrived(1, range(9))
    for token in (50, 51, 52, 53, 54, 55, 56, 57):
        state.fresh.append(token)
        state.known += 1
    every = pack_tokens([*range(9), *range(50, 58)])
    for first in range(4):
        for end in range(first + 1, 5):
            assert state.key(first, end, 4) == every[first * 16 : end * 16], f"pages {first} to {end}"


def test_a_retracted_sequence_knows_all_its_tokens_as_its_prompt() -> None:
    state = arrived(1, range(9))
    state.fresh.extend((50, 51, 52))
    state.known += 3
    assert state.limit_pages == 2
    state.refresh(4)
    assert state.tokens == pack_tokens([*range(9), 50, 51, 52])
    assert (state.known_at_admission, len(state.fresh), state.limit_pages) == (12, 0, 2)
