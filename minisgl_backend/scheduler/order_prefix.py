"""Orders that keep together what shares a prefix: `lpm` and `dfs-weight`, after SGLang (Zheng et al., 2024).

Where it stands in the flow: chosen by `order.py`; both are greedy, so `order.Fair` stands before them.
"""

from __future__ import annotations

from minisgl_backend.cache.radix import RadixCache
from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.scheduler.lazy_heap import LazyHeap
from minisgl_backend.scheduler.prefix_list import Place, PrefixList
from minisgl_backend.scheduler.sequence import SequenceState

_LOOKS = 16
"""How many candidates a single question may look at, whatever the queue's length."""


def _place(state: SequenceState) -> Place:
    return Place(state.namespace, state.tokens, state.id)


class LongestPrefix:
    """`lpm`: who has most tokens in the cache goes first, then by arrival.

    What each waiting sequence would find is remembered. It grows when somebody's pages enter the tree: those who gain
    stand beside that one in the list, nearest first, up to the first who has as much already. (Who is further off than
    `_LOOKS` learns of it when a nearer one is admitted.) It shrinks by eviction: whoever comes to the front is looked
    up again if pages were evicted since.
    """

    __slots__ = ("_found", "_heap", "_list", "_places", "_states", "_tree")

    def __init__(self, tree: RadixCache) -> None:
        self._tree = tree
        self._list = PrefixList(tree.page_size)
        self._heap: LazyHeap[tuple[int, int]] = LazyHeap()  # key: -pages found, arrival
        self._states: dict[SequenceId, SequenceState] = {}
        self._places: dict[SequenceId, Place] = {}
        self._found: dict[SequenceId, tuple[int, int]] = {}  # pages, and the tree's evictions when they were found

    def __len__(self) -> int:
        return len(self._states)

    def push(self, state: SequenceState) -> None:
        place = self._places[state.id] = _place(state)
        self._states[state.id] = state
        self._list.add(place)
        self._look_up(place)

    def remove(self, state: SequenceState) -> None:
        self._list.remove(self._places.pop(state.id))
        self._heap.remove(state.id)
        del self._states[state.id], self._found[state.id]

    take = remove

    def first(self) -> SequenceState | None:
        id = self._heap.first()
        for _ in range(_LOOKS):
            if id is None:
                return None
            pages, evictions = self._found[id]
            if not pages or evictions == self._tree.counts.evicted_pages or self._look_up(self._places[id]) >= pages:
                break
            id = self._heap.first()
        return None if id is None else self._states[id]

    def cached(self, state: SequenceState, pages: int) -> None:
        """The first `pages` pages of `state`, which waits no more, are in the tree now."""
        place = _place(state)
        middle, end = self._list.find(place), len(self._list)
        for beside in (range(middle - 1, max(-1, middle - 1 - _LOOKS), -1), range(middle, min(end, middle + _LOOKS))):
            for index in beside:
                other = self._list[index]
                shared = min(pages, self._list.shared_pages(place, other))
                if shared < 1:
                    break
                usable = min(shared, self._states[other.id].limit_pages)
                if self._found[other.id][0] < usable:
                    self._note(other.id, usable)
                elif usable == shared:
                    break

    def _look_up(self, place: Place) -> int:
        pages = self._tree.peek(place.namespace, place.tokens, self._states[place.id].limit_pages).pages
        self._note(place.id, pages)
        return pages

    def _note(self, id: SequenceId, pages: int) -> None:
        self._found[id] = pages, self._tree.counts.evicted_pages
        self._heap.put(id, (-pages, self._states[id].arrival))

    def check(self) -> None:
        self._list.check()
        self._heap.check()
        assert len(self._list) == len(self._heap) == len(self._states) == len(self._found), "the orders disagree"


class WeightedSubtrees:
    """`dfs-weight`: whoever shares most with the one admitted last; where a subtree is done, the heaviest of its
    siblings is entered.

    So the prefixes of those who wait are walked depth first, and each is computed once, whatever the cache holds and
    however small it is. The weight of a subtree is how many wait in it; `_LOOKS` probes spread evenly over the range
    in question find each that holds more than its share of them.
    """

    __slots__ = ("_choice", "_last", "_list", "_places", "_states")

    def __init__(self, tree: RadixCache) -> None:
        self._list = PrefixList(tree.page_size)
        self._states: dict[SequenceId, SequenceState] = {}
        self._places: dict[SequenceId, Place] = {}
        self._last: Place | None = None  # who was taken last
        self._choice: Place | None = None  # who is next, while nothing has changed

    def __len__(self) -> int:
        return len(self._states)

    def push(self, state: SequenceState) -> None:
        place = self._places[state.id] = _place(state)
        self._states[state.id] = state
        self._list.add(place)
        self._choice = None

    def remove(self, state: SequenceState) -> None:
        self._list.remove(self._places.pop(state.id))
        del self._states[state.id]
        self._choice = None

    def take(self, state: SequenceState) -> None:
        self._last = self._places[state.id]
        self.remove(state)

    def cached(self, state: SequenceState, pages: int) -> None:
        """The order follows those who wait, not what is cached."""

    def first(self) -> SequenceState | None:
        if not self._list:
            return None
        if self._choice is None:
            self._choice = self._choose()
        return self._states[self._choice.id]

    def _choose(self) -> Place:
        if self._last is None:
            return self._heaviest(self._list[0], -1)
        beside = self._list.find(self._last)
        near = [self._list[index] for index in (beside - 1, beside) if 0 <= index < len(self._list)]
        shared = max(self._list.shared_pages(self._last, place) for place in near)
        return self._heaviest(self._last, shared)

    def _heaviest(self, place: Place, pages: int) -> Place:
        """The first in the heaviest of the subtrees into which all who share `pages` pages with `place` fall."""
        first, end = self._list.subtree(place, pages)
        stride = max(1, (end - first) // _LOOKS)
        best, most = self._list[first], 0
        index = first
        while index < end:
            low, high = self._list.around(index, max(pages, 0) + 1, first, end)
            if high - low > most:
                best, most = self._list[low], high - low
            index = max(high, index + stride)
        return best

    def check(self) -> None:
        self._list.check()
        assert len(self._list) == len(self._states) == len(self._places), "the orders disagree"
