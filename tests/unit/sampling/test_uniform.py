"""The counter-based hash behind every draw."""

from __future__ import annotations

import numpy as np

from minisgl_backend.sampling.uniform import uniform


def column(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def test_a_number_depends_on_its_own_row_only() -> None:
    together = uniform(column(1, 2, 3), column(0, 0, 1), column(10, 20, 30))
    for row, (seed, index, position) in enumerate([(1, 0, 10), (2, 0, 20), (3, 1, 30)]):
        assert uniform(column(seed), column(index), column(position))[0] == together[row]


def test_numbers_never_change_from_one_version_to_the_next() -> None:
    """A seed is a promise to the client: these were written down when the hash was chosen."""
    numbers = uniform(column(0, 1, 2**63 - 1), column(0, 0, 3), column(1, 5, 100_000))
    assert numbers.tolist() == [0.4698513593679622, 0.9898018796122229, 0.06940704634500805]


def test_numbers_fill_the_unit_interval_evenly_along_each_argument() -> None:
    count = 20_000
    walk, still = np.arange(count, dtype=np.uint64), np.zeros(count, np.uint64)
    for arguments in ((walk, still, still), (still, walk, still), (still, still, walk)):
        numbers = uniform(*arguments)
        assert numbers.min() >= 0.0 and numbers.max() < 1.0
        counts, _ = np.histogram(numbers, bins=50, range=(0, 1))
        chi_square = ((counts - count / 50) ** 2 / (count / 50)).sum()
        assert chi_square < 85.4  # 0.1 % point of 49 degrees of freedom
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_the_arguments_do_not_stand_in_for_each_other() -> None:
    numbers = [uniform(column(a), column(b), column(c))[0] for a in range(4) for b in range(4) for c in range(4)]
    assert len(set(numbers)) == 64
