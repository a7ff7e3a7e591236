"""Ids in the order of their keys, each to be taken out or given another key at any time.

Where it stands in the flow: under the deadlines (`deadlines.py`) and the orders of the waiting queue (`order.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from minisgl_backend.messages.ids import SequenceId

Key = TypeVar("Key", float, tuple[int, int])

_SLACK = 64
"""Entries that may be stale beyond as many as are live; then the heap is built anew."""


class LazyHeap(Generic[Key]):
    """Smallest key first, equal keys by id. What is removed stays as a stale entry until it is at the front or half
    of all are stale: every call is O(log n) on average.
    """

    __slots__ = ("_heap", "_keys")

    def __init__(self) -> None:
        self._heap: list[tuple[Key, SequenceId]] = []
        self._keys: dict[SequenceId, Key] = {}  # what of the heap is live

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[SequenceId]:
        """By the time of their entry."""
        return iter(self._keys)

    def put(self, id: SequenceId, key: Key) -> None:
        """Enters `id`, or gives it another key."""
        self._keys[id] = key
        heappush(self._heap, (key, id))
        self._trim()

    def remove(self, id: SequenceId) -> None:
        """Harmless for an id that is not in."""
        if self._keys.pop(id, None) is not None:
            self._trim()

    def key(self, id: SequenceId) -> Key | None:
        return self._keys.get(id)

    def first(self) -> SequenceId | None:
        heap, keys = self._heap, self._keys
        while heap:
            key, id = heap[0]
            if keys.get(id) == key:
                return id
            heappop(heap)
        return None

    def check(self) -> None:
        """Proves that every live id is in the heap under its key, and that the heap did not outgrow them."""
        entries = set(self._heap)
        for id, key in self._keys.items():
            assert (key, id) in entries, f"the entry of sequence {id} is lost"
        assert len(self._heap) <= 2 * len(self._keys) + _SLACK, f"{len(self._heap)} entries, {len(self._keys)} live"

    def _trim(self) -> None:
        if len(self._heap) > 2 * len(self._keys) + _SLACK:
            self._heap = [(key, id) for id, key in self._keys.items()]
            heapify(self._heap)
