"""The lazy heap: the smallest live key first, whatever was removed or keyed anew in between."""

from __future__ import annotations

import random

from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.scheduler.lazy_heap import LazyHeap


def test_random_puts_and_removals_agree_with_a_plain_dict() -> None:
    chance = random.Random(11)
    heap: LazyHeap[tuple[int, int]] = LazyHeap()
    plain: dict[SequenceId, tuple[int, int]] = {}
    for _ in range(5000):
        id = SequenceId(chance.randrange(60))
        if chance.random() < 0.6:
            heap.put(id, plain.setdefault(id, (0, 0)))
            plain[id] = (chance.randrange(5), chance.randrange(5))
            heap.put(id, plain[id])
        else:
            heap.remove(id)
            plain.pop(id, None)
        assert heap.first() == min(plain, key=lambda id: (plain[id], id), default=None)
        assert len(heap) == len(plain)
        heap.check()


def test_it_does_not_grow_with_what_was_removed() -> None:
    heap: LazyHeap[float] = LazyHeap()
    heap.put(SequenceId(0), -1.0)
    for number in range(1, 10_000):
        heap.put(SequenceId(number), float(number))
        heap.put(SequenceId(1), float(number))
        heap.remove(SequenceId(number))
    heap.check()
    assert heap.first() == 0
