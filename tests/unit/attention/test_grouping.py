"""Which decode rows share a product."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minisgl_backend.attention.grouping import group_by_length


def padded(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size) * page_size


@given(
    st.lists(st.integers(1, 5000), max_size=60),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([1, 1000, 20_000, 1 << 30]),
)
def test_every_row_is_in_one_group_and_no_group_wastes_or_holds_too_much(
    lengths: list[int], page_size: int, limit: int
) -> None:
    groups = group_by_length(lengths, page_size, limit)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        sizes = [padded(lengths[index], page_size) for index in group]
        assert len(group) == 1 or len(group) * max(sizes) <= limit
        assert all(2 * size >= max(sizes) or max(sizes) - size <= 64 for size in sizes)


def test_rows_of_one_length_are_one_group() -> None:
    assert group_by_length([100] * 32, 16, 1 << 20) == [list(range(32))]


def test_short_rows_are_not_padded_to_a_long_one() -> None:
    assert group_by_length([10, 4000, 12, 3900], 16, 1 << 20) == [[1, 3], [2, 0]]
