"""The schedule of cancellation checks: everybody's turn, and never too many questions."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl_backend.messages.ids import RequestId
from minisgl_backend.serving.polling import PollSchedule


def asked_at(schedule: PollSchedule, until_s: float) -> list[tuple[float, int]]:
    """Plays a thread that waits exactly until the next question is due."""
    asked = []
    while (due := schedule.due_at()) is not None and due <= until_s:
        id = schedule.take(due)
        assert id is not None
        asked.append((due, id))
    return asked


def test_without_requests_nothing_is_due() -> None:
    schedule = PollSchedule(0.1, 0.004)
    assert schedule.due_at() is None
    assert schedule.take(1e9) is None


def test_a_lone_request_is_asked_once_a_period() -> None:
    schedule = PollSchedule(0.1, 0.004)
    schedule.add(RequestId(1), 5.0)
    assert schedule.take(5.05) is None
    assert [at for at, _ in asked_at(schedule, 5.35)] == pytest.approx([5.1, 5.2, 5.3])


def test_requests_take_turns() -> None:
    schedule = PollSchedule(0.1, 0.004)
    for id in (1, 2, 3):
        schedule.add(RequestId(id), 0.0)
    assert [id for _, id in asked_at(schedule, 0.21)] == [1, 2, 3, 1, 2, 3]


def test_missed_questions_are_not_made_up_for() -> None:
    schedule = PollSchedule(0.1, 0.004)
    schedule.add(RequestId(1), 0.0)
    assert schedule.take(10.0) == 1
    assert schedule.take(10.0) is None


def test_a_removed_request_is_not_asked_again() -> None:
    schedule = PollSchedule(0.1, 0.004)
    schedule.add(RequestId(1), 0.0)
    schedule.add(RequestId(2), 0.0)
    schedule.remove(RequestId(1))
    schedule.remove(RequestId(9))
    assert {id for _, id in asked_at(schedule, 1.0)} == {2}


@given(count=st.integers(1, 300))
def test_every_request_is_asked_in_time_and_questions_keep_their_distance(count: int) -> None:
    schedule = PollSchedule(0.1, 0.004)
    for id in range(count):
        schedule.add(RequestId(id), 0.0)
    round_s = max(0.1, 0.004 * count)
    asked = asked_at(schedule, 2 * round_s + 1e-6)
    times = [at for at, _ in asked]
    assert min((b - a for a, b in itertools.pairwise(times)), default=1.0) >= 0.004 - 1e-9
    for id in range(count):
        own = [at for at, asked_id in asked if asked_id == id]
        assert own[0] <= round_s + 1e-6
        assert own[1] - own[0] <= round_s + 1e-6
