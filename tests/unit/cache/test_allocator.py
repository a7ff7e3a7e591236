"""Each page has exactly one owner, and the allocator notices when somebody forgets it."""

from __future__ import annotations

from array import array

import pytest

from minisgl_backend.cache.allocator import PageAllocator
from minisgl_backend.messages.ids import StepId


def test_pages_are_handed_out_in_order_and_the_last_freed_first() -> None:
    pages = PageAllocator(6)
    first, second = pages.take(2), pages.take(3)
    assert (first.tolist(), second.tolist()) == ([0, 1], [2, 3, 4])
    pages.release(first, StepId(0))
    assert pages.take(3).tolist() == [0, 1, 5]
    assert pages.free_pages == 0


def test_a_page_named_by_a_step_in_flight_is_not_handed_out_before_it_is_applied() -> None:
    pages = PageAllocator(2)
    taken = pages.take(2)
    pages.release(taken, StepId(2))
    assert pages.free_pages == 0
    pages.applied(StepId(1))
    assert pages.free_pages == 0
    pages.check([])
    pages.applied(StepId(2))
    assert pages.free_pages == 2
    pages.check([])


def test_more_pages_than_are_free_can_not_be_taken() -> None:
    pages = PageAllocator(2)
    pages.take(1)
    with pytest.raises(AssertionError, match="2 pages wanted, 1 free"):
        pages.take(2)
    with pytest.raises(AssertionError, match="0 pages wanted"):
        pages.take(0)
    pages.take_one()
    with pytest.raises(AssertionError, match="a page wanted, none free"):
        pages.take_one()


@pytest.mark.parametrize("tag", [0, 1])
def test_a_page_released_twice_is_noticed_at_once(tag: int) -> None:
    pages = PageAllocator(2)
    taken = pages.take(1)
    pages.release(taken, StepId(tag))
    with pytest.raises(AssertionError, match="page 0 should move from a sequence"):
        pages.release(taken, StepId(tag))


def test_the_check_finds_a_page_in_two_tables() -> None:
    pages = PageAllocator(3)
    taken = pages.take(2)
    pages.check([taken])
    with pytest.raises(AssertionError, match="page 1 is held twice"):
        pages.check([taken, array("i", [1])])


def test_the_check_finds_a_lost_page() -> None:
    pages = PageAllocator(3)
    taken = pages.take(2)
    with pytest.raises(AssertionError, match="page 1 is lost"):
        pages.check([taken[:1]])


def test_the_check_finds_a_page_that_somebody_uses_without_having_taken_it() -> None:
    pages = PageAllocator(3)
    taken = pages.take(2)
    with pytest.raises(AssertionError, match="page 2 is held twice"):
        pages.check([taken, array("i", [2])])
