"""The waiting sequences sorted by their tokens: who shares a prefix stands side by side.

Where it stands in the flow: under the orders `lpm` and `dfs-weight` (`order_prefix.py`). In a sorted list the subtrees
of the prefix tree of all who wait are ranges, and the nearest relatives of a sequence are its neighbours:

    [sys][a]         ┐ what begins with [sys][a]  ┐
    [sys][a][x]      ┘                            │ what begins with [sys]
    [sys][b][y]      ── the nearest to [sys][b]…  ┘
    [zzz]
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import NamedTuple

from minisgl_backend.messages.ids import SequenceId

_AFTER_ALL = b"\xff\xff\xff\xff"
"""Greater than any token: ids are below 2**31, and their highest byte stands last."""


class Place(NamedTuple):
    """What the list is sorted by."""

    namespace: bytes
    tokens: bytes  # packed int32
    id: SequenceId


class PrefixList:
    """Entering and leaving is a bisection and a shift of pointers (some µs up to tens of thousands of entries)."""

    __slots__ = ("_places", "_unit")

    def __init__(self, page_size: int) -> None:
        self._places: list[Place] = []
        self._unit = page_size * array("i").itemsize  # bytes of a page's tokens

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Place:
        return self._places[index]

    def add(self, place: Place) -> None:
        self._places.insert(bisect_left(self._places, place), place)

    def remove(self, place: Place) -> None:
        """`place` must be in."""
        index = bisect_left(self._places, place)
        assert index < len(self._places) and self._places[index] == place, f"sequence {place.id} is not in the list"
        del self._places[index]

    def find(self, place: Place) -> int:
        """Where `place` stands, or would stand."""
        return bisect_left(self._places, place)

    def shared_pages(self, one: Place, other: Place) -> int:
        """Whole pages of tokens that both begin with; -1 in different namespaces."""
        if one.namespace != other.namespace:
            return -1
        return shared_bytes(one.tokens, other.tokens) // self._unit

    def subtree(self, place: Place, pages: int) -> tuple[int, int]:
        """The range of all that share the first `pages` pages with `place`: first, behind the last."""
        if pages < 0:
            return 0, len(self._places)
        prefix = place.tokens[: pages * self._unit]
        first = bisect_left(self._places, (place.namespace, prefix, -1))
        return first, bisect_left(self._places, (place.namespace, prefix + _AFTER_ALL, -1), first)

    def around(self, index: int, pages: int, first: int, end: int) -> tuple[int, int]:
        """The range within `first` … `end` of all that share the first `pages` ≥ 1 pages with the one at `index`.

        Most have no such relative: then two looks suffice.
        """
        places = self._places
        namespace, tokens, _ = places[index]
        prefix = tokens[: pages * self._unit]
        low, high = index, index + 1
        if low > first and _begins(places[low - 1], namespace, prefix):
            low = bisect_left(places, (namespace, prefix, -1), first, low)
        if high < end and _begins(places[high], namespace, prefix):
            high = bisect_left(places, (namespace, prefix + _AFTER_ALL, -1), high, end)
        return low, high

    def check(self) -> None:
        """Proves that the list is sorted, everything in it once."""
        for one, other in zip(self._places, self._places[1:], strict=False):
            assert one < other, f"sequences {one.id} and {other.id} stand in the wrong order"


def _begins(place: Place, namespace: bytes, prefix: bytes) -> bool:
    return place.tokens.startswith(prefix) and place.namespace == namespace


def shared_bytes(one: bytes, other: bytes) -> int:
    """Length of the longest common prefix: halves the doubtful part, so it costs some comparisons in C."""
    same, end = 0, min(len(one), len(other))
    if one[:end] == other[:end]:
        return end
    while end - same > 1:
        half = (same + end) // 2
        if one[same:half] == other[same:half]:
            same = half
        else:
            end = half
    return same
