"""Tokens a second, times to the first token and between tokens, as the view of the engine tells them."""

from __future__ import annotations

from minisgl_backend.actors.rates import KEPT_GAPS, WINDOW_S, Rates
from minisgl_backend.messages.ids import SequenceId

NOTHING = {"p50": None, "p90": None, "p99": None}


def ids(*numbers: int) -> list[SequenceId]:
    return [SequenceId(number) for number in numbers]


def test_before_the_first_token_nothing_is_told() -> None:
    rates = Rates()
    rates.tokens((), 5.0)
    assert (rates.tokens_per_s(5.0), rates.ttft_ms(), rates.itl_ms()) == (0.0, NOTHING, NOTHING)


def test_tokens_of_the_last_seconds_count_and_older_ones_do_not() -> None:
    rates = Rates()
    for step in range(100):
        rates.tokens(ids(1, 2, 3), step * 0.01)
    assert rates.tokens_per_s(1.0) == 300 / WINDOW_S
    assert rates.tokens_per_s(0.95 + WINDOW_S) < 300 / WINDOW_S
    assert rates.tokens_per_s(1.0 + WINDOW_S) == 0.0


def test_the_time_between_tokens_is_that_of_each_sequence() -> None:
    rates = Rates()
    rates.tokens(ids(1), 0.0)
    rates.tokens(ids(2), 1.0)
    rates.tokens(ids(1, 2), 1.5)  # 1.5 s and 0.5 s
    assert rates.itl_ms() == {"p50": 500.0, "p90": 1500.0, "p99": 1500.0}


def test_an_end_begins_no_gap_and_an_engine_that_died_ends_all() -> None:
    rates = Rates()
    rates.tokens(ids(1, 2), 0.0)
    rates.ended(ids(1, 7))
    rates.tokens(ids(1), 9.0)
    rates.all_ended()
    rates.tokens(ids(1, 2), 20.0)
    assert rates.itl_ms() == NOTHING


def test_percentiles_are_of_the_latest() -> None:
    rates = Rates()
    for number in range(1, 101):
        rates.first_token(number / 1000)
    assert rates.ttft_ms() == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    for number in range(2 * KEPT_GAPS + 1):
        rates.tokens(ids(1), min(number, KEPT_GAPS) * 10.0 + max(0, number - KEPT_GAPS) * 0.001)
    assert rates.itl_ms() == {"p50": 1.0, "p90": 1.0, "p99": 1.0}
