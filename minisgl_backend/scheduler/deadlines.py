"""Whose deadline has passed.

Where it stands in the flow: `Scheduler.add` enters a sequence that has a deadline, its end takes it out, and every
`plan` asks who is too late. Asking costs nothing while nobody is, however many sequences live.
"""

from __future__ import annotations

from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.scheduler.lazy_heap import LazyHeap


class Deadlines:
    """All sequences that have a deadline and have not ended."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: LazyHeap[float] = LazyHeap()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, id: SequenceId, deadline_s: float) -> None:
        """`id` must not be in; `deadline_s` is monotonic seconds."""
        assert self._heap.key(id) is None, f"sequence {id} has a deadline already"
        assert deadline_s == deadline_s, f"sequence {id}: its deadline is no time"
        self._heap.put(id, deadline_s)

    def remove(self, id: SequenceId) -> None:
        """Harmless for a sequence without a deadline."""
        self._heap.remove(id)

    def expired(self, now: float) -> list[SequenceId]:
        """Takes out all whose deadline is `now` or before: by deadline, then by id."""
        late: list[SequenceId] = []
        while (id := self._heap.first()) is not None:
            deadline_s = self._heap.key(id)
            if deadline_s is None or deadline_s > now:
                break
            self._heap.remove(id)
            late.append(id)
        return late

    def check(self) -> None:
        """Proves that no deadline is lost."""
        self._heap.check()
