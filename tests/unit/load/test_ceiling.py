"""The benchmark of the machine itself: what it counts, with a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from load.bench.ceiling import product_gflop_s, read_gb_s


def clock(*durations_s: float) -> Callable[[], float]:
    """Each pair of looks at it is one of these apart."""
    looks = iter([look for duration in durations_s for look in (0.0, duration)])
    return lambda: next(looks)


def test_the_bytes_of_the_matrix_over_the_shortest_time_are_what_is_read_a_second() -> None:
    assert read_gb_s(1 << 20, 3, clock(0.5, 0.25, 2.0)) == pytest.approx((1 << 20) / 0.25 / 1e9)


def test_a_product_is_two_operations_for_each_of_its_multiplications() -> None:
    assert product_gflop_s(64, 2, clock(4.0, 2.0)) == pytest.approx(2 * 64**3 / 2.0 / 1e9)
