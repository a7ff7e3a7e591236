"""Whose deadline has passed.

Where it stands in the flow: `Scheduler.add` enters a sequence that has a deadline, its end takes it out, and every
`plan` asks who is too late. Asking costs nothing while nobody is, however many sequences live.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from minisgl_backend.messages.ids import SequenceId

_SLACK = 64
"""Entries of the heap that may be stale beyond as many as are live; then it is built anew."""


class Deadlines:
    """A heap by time. What is removed stays in it as a stale entry until its time comes or half of it is stale."""

    __slots__ = ("_heap", "_of")

    def __init__(self) -> None:
        self._heap: list[tuple[float, SequenceId]] = []
        self._of: dict[SequenceId, float] = {}  # what of the heap is live

    def __len__(self) -> int:
        return len(self._of)

    def add(self, id: SequenceId, deadline_s: float) -> None:
        """`id` must not be in; `deadline_s` is monotonic seconds."""
        assert id not in self._of, f"sequence {id} has a deadline already"
        assert deadline_s == deadline_s, f"sequence {id}: its deadline is no time"
        self._of[id] = deadline_s
        heappush(self._heap, (deadline_s, id))

    def remove(self, id: SequenceId) -> None:
        """Harmless for a sequence without a deadline."""
        if self._of.pop(id, None) is not None and len(self._heap) > 2 * len(self._of) + _SLACK:
            self._heap = [(deadline_s, id) for id, deadline_s in self._of.items()]
            heapify(self._heap)

    def expired(self, now: float) -> list[SequenceId]:
        """Takes out all whose deadline is `now` or before: by deadline, then by id."""
        late: list[SequenceId] = []
        heap = self._heap
        while heap and heap[0][0] <= now:
            deadline_s, id = heappop(heap)
            if self._of.get(id) == deadline_s:
                del self._of[id]
                late.append(id)
        return late

    def check(self) -> None:
        """Proves that every live deadline is in the heap, and that the heap did not outgrow them."""
        entries = set(self._heap)
        for id, deadline_s in self._of.items():
            assert (deadline_s, id) in entries, f"the deadline of sequence {id} is lost"
        assert len(self._heap) <= 2 * len(self._of) + _SLACK + 1, f"{len(self._heap)} entries, {len(self._of)} live"
