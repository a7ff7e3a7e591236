"""The chance behind every draw: keys of rows, the words hashed of them and of ids, and who wins.

Limits of chi-squares are 0.1 % points; seeds are the first ones, whatever came of them.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from minisgl_backend.sampling.race import _words, row_keys, winners

WORDS = 1 << 32
KEYS = [[2003778009, 2017996222], [1949170033, -43800594], [703370192, 298100994]]
WINNERS = [49962, 36798, 42051]


def column(*values: int) -> npt.NDArray[np.uint64]:
    return np.array(values, np.uint64)


def along(axis: str, count: int) -> Tensor:
    """Keys of `count` rows that differ in one number: 0, 1, 2, …"""
    numbers = {name: np.zeros(count, np.uint64) for name in ("seed", "sample index", "position")}
    numbers[axis] = np.arange(count, dtype=np.uint64)
    return torch.from_numpy(row_keys(*numbers.values()))


AXES = ["seed", "sample index", "position"]


def ids_up_to(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int32)[None]


def assert_even(counts: npt.NDArray[np.int64], shares: npt.NDArray[np.float64] | None = None) -> None:
    """counts of independent events follow shares (equal ones): below the 0.1 % point of chi-square."""
    counts = counts.ravel()
    expected = counts.sum() / counts.size if shares is None else counts.sum() * shares / shares.sum()
    assert np.min(expected) >= 5, "too few for a chi-square"
    degrees = counts.size - 1
    chi_square = ((counts - expected) ** 2 / expected).sum()
    limit = degrees * (1 - 2 / (9 * degrees) + 3.0902 * math.sqrt(2 / (9 * degrees))) ** 3  # Wilson and Hilferty 1931
    assert chi_square < limit, f"{chi_square:.1f} with {degrees} degrees of freedom, limit {limit:.1f}"


def test_a_key_depends_on_its_own_row_only() -> None:
    together = row_keys(column(1, 2, 3), column(0, 0, 1), column(10, 20, 30))
    for row, (seed, index, position) in enumerate([(1, 0, 10), (2, 0, 20), (3, 1, 30)]):
        assert row_keys(column(seed), column(index), column(position))[0].tolist() == together[row].tolist()


def test_keys_and_winners_never_change_from_one_version_to_the_next() -> None:
    """A seed is a promise to the client: these were written down when the hashes were chosen."""
    keys = row_keys(column(0, 1, 2**63 - 1), column(0, 0, 3), column(1, 5, 100_000))
    assert keys.tolist() == KEYS
    assert winners(torch.from_numpy(keys), ids_up_to(50_000), torch.ones(3, 50_000)).tolist() == WINNERS


@pytest.mark.parametrize("axis", AXES)
def test_keys_are_even_along_each_argument(axis: str) -> None:
    for words in along(axis, 20_000).numpy().view(np.uint32).T:
        assert_even(np.bincount(words >> 26, minlength=64))
        assert_even(np.bincount(words & 63, minlength=64))
        numbers = words / WORDS
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.024  # 3.3 of its standard deviations


def test_the_arguments_do_not_stand_in_for_each_other() -> None:
    keys = [tuple(row_keys(column(a), column(b), column(c))[0]) for a in range(4) for b in range(4) for c in range(4)]
    assert len(set(keys)) == 64


def test_words_are_what_whole_numbers_give_and_the_least_time_wins() -> None:
    keys, ids = along("seed", 50), torch.tensor([[0, 1, 2, 77, 32_767, 32_768, 49_151, 131_071, 262_143]]).int()
    weights = torch.rand(50, 9, generator=torch.Generator().manual_seed(0))
    words = [[word(*key, id) for id in ids[0].tolist()] for key in (keys.numpy().view(np.uint32)).tolist()]
    assert _words(keys, ids).numpy().view(np.uint32).tolist() == words
    times = -np.log1p(-(np.array(words, np.float64) + 0.5) / WORDS) / weights.double().numpy()
    assert winners(keys, ids, weights).tolist() == times.argmin(-1).tolist()


def word(first: int, second: int, id: int) -> int:
    mixed = (id ^ first) * (second | 1) % WORDS
    return (mixed ^ (mixed >> 15)) * 0x846CA68B % WORDS


def test_columns_may_come_in_any_order_and_what_has_no_weight_never_wins() -> None:
    keys, ids = along("position", 300), ids_up_to(500)
    weights = torch.rand(300, 500, generator=torch.Generator().manual_seed(1)).masked_fill(ids % 3 == 1, 0.0)
    won = winners(keys, ids, weights)
    assert (won % 3 != 1).all()
    order = torch.randperm(500, generator=torch.Generator().manual_seed(2))
    assert order[winners(keys, ids[:, order], weights[:, order])].equal(won)
    assert winners(keys, ids, weights * 2.0**40).equal(won)
    alone = torch.zeros(300, 500)
    alone[:, 77] = 2.0**-40
    assert (winners(keys, ids, alone) == 77).all()


@pytest.mark.slow
@pytest.mark.parametrize("axis", AXES)
def test_equals_win_equally_often_and_independently_of_the_row_before(axis: str) -> None:
    won = winners(along(axis, 20_000), ids_up_to(1600), torch.ones(20_000, 1600)).numpy()
    assert_even(np.bincount(won // 32, minlength=50))
    assert_even(np.bincount(won % 32, minlength=32))
    for pairs in (won[0::2] // 100 * 16 + won[1::2] // 100, won[0::2] % 16 * 16 + won[1::2] % 16):
        assert_even(np.bincount(pairs, minlength=256))


@pytest.mark.slow
@pytest.mark.parametrize("apart", [1, 3, 64])
def test_words_of_ids_near_each_other_are_independent(apart: int) -> None:
    """Ten million pairs, from an odd id on: a hash with fixed factors, good for single words, fails at 1."""
    keys, counts = along("position", 400), np.zeros(4096, np.int64)
    for some in keys.split(50):
        high = _words(some, ids_up_to(49_152) + 1).numpy().view(np.uint32) >> 26
        pairs = high.reshape(50, -1, 2, apart)
        counts += np.bincount((pairs[:, :, 0] * 64 + pairs[:, :, 1]).ravel(), minlength=4096)
    assert_even(counts)


@pytest.mark.slow
def test_probabilities_down_to_one_in_a_hundred_thousand_are_kept() -> None:
    shares = np.repeat([1e-5, 1e-4, 1e-3, 1e-2], [10, 8, 4, 2])
    shares = np.append(shares, 1 - shares.sum())
    weights = torch.from_numpy(shares / shares.max()).float()
    counts = np.zeros(25, np.int64)
    for keys in along("position", 2_000_000).split(100_000):
        won = winners(keys, ids_up_to(25), weights.expand(len(keys), -1))
        counts += np.bincount(won.numpy(), minlength=25)
    assert_even(counts, shares)


def test_what_is_far_less_likely_than_a_word_can_tell_is_not_drawn_more_often() -> None:
    """A hundred thousand tokens of 2**-40 of the best one: all together a part in ten million."""
    weights = torch.full((100, 100_000), 2.0**-40)
    weights[:, 5] = 1.0
    assert (winners(along("seed", 100), ids_up_to(100_000), weights) == 5).all()
