"""The schedule of cancellation checks: everybody's turn in time, few wake-ups, and never too many questions."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl_backend.messages.ids import RequestId
from minisgl_backend.serving.polling import PollSchedule


def asked_at(schedule: PollSchedule, until_s: float) -> list[tuple[float, int]]:
    """Plays a thread that sleeps until it must ask, and then asks all whose turn has come."""
    asked = []
    while (wake := schedule.wake_at()) is not None and wake <= until_s:
        id = schedule.take(wake)
        assert id is not None
        while id is not None:
            asked.append((wake, int(id)))
            id = schedule.take(wake)
    return asked


def test_without_requests_nobody_is_woken() -> None:
    schedule = PollSchedule(0.1, 0.05, 0.004)
    assert schedule.wake_at() is None
    assert schedule.take(1e9) is None


def test_a_thread_that_is_awake_asks_when_the_turn_comes_and_one_that_sleeps_a_little_later() -> None:
    schedule = PollSchedule(0.1, 0.05, 0.004)
    schedule.add(RequestId(1), 5.0)
    assert schedule.take(5.09) is None
    assert schedule.wake_at() == pytest.approx(5.15)
    assert schedule.take(5.11) == 1
    assert [at for at, _ in asked_at(schedule, 5.6)] == pytest.approx([5.26, 5.41, 5.56])


def test_requests_that_came_at_about_the_same_time_are_asked_in_one_wake_up() -> None:
    schedule = PollSchedule(0.1, 0.05, 0.004)
    for id in range(1, 9):
        schedule.add(RequestId(id), 0.004 * id)
    asked = asked_at(schedule, 0.5)
    assert len({at for at, _ in asked}) == 3
    assert [id for _, id in asked] == [1, 2, 3, 4, 5, 6, 7, 8] * 3


def test_missed_questions_are_not_made_up_for() -> None:
    schedule = PollSchedule(0.1, 0.05, 0.004)
    schedule.add(RequestId(1), 0.0)
    assert schedule.take(10.0) == 1
    assert schedule.take(10.0) is None


def test_a_removed_request_is_not_asked_again() -> None:
    schedule = PollSchedule(0.1, 0.05, 0.004)
    schedule.add(RequestId(1), 0.0)
    schedule.add(RequestId(2), 0.0)
    schedule.remove(RequestId(1))
    schedule.remove(RequestId(9))
    assert {id for _, id in asked_at(schedule, 1.0)} == {2}


def test_when_a_crowd_has_gone_who_is_left_and_who_comes_is_asked_as_often_as_ever() -> None:
    schedule = PollSchedule(0.1, 0.05, 0.004)
    for id in range(250):
        schedule.add(RequestId(id), 0.0)
    assert schedule.take(0.11) == 0, "its next turn is a second away"
    for id in range(1, 250):
        schedule.remove(RequestId(id))
    schedule.add(RequestId(1000), 0.12)
    assert [id for _, id in asked_at(schedule, 0.3)] == [0, 1000]


@given(arrivals=st.lists(st.floats(0.0, 2.0), min_size=1, max_size=300))
def test_every_request_is_asked_in_time_and_all_together_not_too_often(arrivals: list[float]) -> None:
    period_s, slack_s, spacing_s = 0.1, 0.05, 0.004
    schedule = PollSchedule(period_s, slack_s, spacing_s)
    for id, arrived_s in enumerate(sorted(arrivals)):
        schedule.add(RequestId(id), arrived_s)
    interval_s = max(period_s, spacing_s * len(arrivals))
    begin = max(arrivals) + interval_s + slack_s  # all have been asked, so all keep to the interval of so many
    asked_at(schedule, begin)
    asked = asked_at(schedule, begin + 10 * (interval_s + slack_s))
    for id in range(len(arrivals)):
        own = [at for at, asked_id in asked if asked_id == id]
        assert len(own) >= 9
        gaps = [later - earlier for earlier, later in itertools.pairwise(own)]
        assert min(gaps) >= interval_s - 1e-9
        assert max(gaps) <= interval_s + slack_s + 1e-9
