"""Who waits for a view of the engine, while the scheduler does not answer."""

from __future__ import annotations

from minisgl_backend.actors.engine_view import EngineView
from minisgl_backend.actors.rates import Rates
from minisgl_backend.messages.ids import SequenceId


def test_who_left_is_not_kept_however_long_the_scheduler_takes_and_it_is_asked_once() -> None:
    view = EngineView(Rates(), 16, shows_prompts=False)
    asked = []
    for number in range(1000):
        asked.append(view.wait(SequenceId(number)))
        if number % 100:
            view.leave(SequenceId(number))
    assert asked == [True] + [False] * 999, "one question is on its way, also when all who waited have left"
    view.leave(SequenceId(5000))  # which never waited
    assert view.take_waiting() == [SequenceId(number) for number in range(0, 1000, 100)]
    assert view.wait(SequenceId(1)) and view.take_waiting() == [SequenceId(1)]


def test_another_engine_is_asked_anew() -> None:
    view = EngineView(Rates(), 16, shows_prompts=False)
    assert view.wait(SequenceId(1)) and not view.wait(SequenceId(2))
    view.forget()
    assert view.wait(SequenceId(3)) and view.take_waiting() == [SequenceId(3)]
