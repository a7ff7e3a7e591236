"""In which order waiting sequences are admitted.

Where it stands in the flow: `Scheduler.add` and a retraction push into an Order, an abort removes from it, and
`Scheduler.plan` admits its first again and again while budget, slots and pages last. The first waits until it fits;
nobody overtakes it but by becoming the first.

| policy       | first is                                                      | starvation                       |
|--------------|---------------------------------------------------------------|----------------------------------|
| `fcfs`       | who arrived first                                             | impossible                       |
| `priority`   | the smallest priority, then who arrived first                 | `Fair`                           |
| `lpm`        | the longest prefix in the cache, then who arrived first       | `Fair`                           |
| `dfs-weight` | who shares most with the one before; then the heaviest subtree| `Fair`                           |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from minisgl_backend.cache.radix import RadixCache
from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.scheduler.lazy_heap import LazyHeap
from minisgl_backend.scheduler.order_prefix import LongestPrefix, WeightedSubtrees
from minisgl_backend.scheduler.sequence import SequenceState

Policy = Literal["fcfs", "lpm", "dfs-weight", "priority"]

FAIR_EVERY = 8
"""Of so many admissions in a row, one at least is the oldest's."""


class Order(Protocol):
    """The waiting sequences. A sequence that is retracted comes back with its old arrival, and so in its old place.

    Of a sequence are read id, arrival, priority, namespace, tokens and limit_pages, which stay while it waits.
    """

    def push(self, state: SequenceState) -> None:
        """Enters a sequence; it waits from now on."""

    def first(self) -> SequenceState | None:
        """Who is to be admitted next; None when nobody waits."""

    def take(self, state: SequenceState) -> None:
        """`state`, the first, is admitted."""

    def remove(self, state: SequenceState) -> None:
        """`state` waits no more and was not admitted."""

    def cached(self, state: SequenceState, pages: int) -> None:
        """The first `pages` pages of tokens of `state`, which runs, are in the prefix cache from now on."""

    def __len__(self) -> int: ...

    def check(self) -> None:
        """Proves that the order's own books agree."""


def make_order(policy: Policy, tree: RadixCache) -> Order:
    """The order of a policy over the sequences that wait for `tree`."""
    if policy == "fcfs":
        return ByKey(by_arrival)
    if policy == "priority":
        return Urgent()
    return Fair(LongestPrefix(tree) if policy == "lpm" else WeightedSubtrees(tree))


def by_arrival(state: SequenceState) -> tuple[int, int]:
    """The key of `fcfs`."""
    return state.arrival, 0


def by_priority(state: SequenceState) -> tuple[int, int]:
    """The key of `priority`."""
    return state.priority, state.arrival


class ByKey:
    """The smallest key first."""

    __slots__ = ("_heap", "_key", "_states")

    def __init__(self, key: Callable[[SequenceState], tuple[int, int]]) -> None:
        self._key = key
        self._heap: LazyHeap[tuple[int, int]] = LazyHeap()
        self._states: dict[SequenceId, SequenceState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def push(self, state: SequenceState) -> None:
        self._states[state.id] = state
        self._heap.put(state.id, self._key(state))

    def first(self) -> SequenceState | None:
        id = self._heap.first()
        return None if id is None else self._states[id]

    def remove(self, state: SequenceState) -> None:
        del self._states[state.id]
        self._heap.remove(state.id)

    take = remove

    def cached(self, state: SequenceState, pages: int) -> None:
        """Nothing to do: keys do not change."""

    def check(self) -> None:
        self._heap.check()
        assert list(self._heap) == list(self._states), "the orders disagree"


class Fair:
    """Lets nobody starve under an order that could pass somebody over for ever.

    After `FAIR_EVERY` - 1 admissions of others the oldest is the first, and stays so until it is admitted. Hence a
    sequence before which n older ones wait is among the next FAIR_EVERY · (n + 1) admissions, whatever arrives.
    """

    __slots__ = ("_oldest", "_order", "_passed")

    def __init__(self, order: Order) -> None:
        self._order = order
        self._oldest = ByKey(by_arrival)
        self._passed = 0  # admissions since the oldest's turn

    def __len__(self) -> int:
        return len(self._oldest)

    def push(self, state: SequenceState) -> None:
        self._oldest.push(state)
        self._order.push(state)

    def first(self) -> SequenceState | None:
        return self._oldest.first() if self._is_oldests_turn() else self._order.first()

    def take(self, state: SequenceState) -> None:
        self._passed = 0 if state is self._oldest.first() else self._passed + 1
        self._oldest.remove(state)
        self._order.take(state)

    def remove(self, state: SequenceState) -> None:
        self._oldest.remove(state)
        self._order.remove(state)

    def cached(self, state: SequenceState, pages: int) -> None:
        self._order.cached(state, pages)

    def check(self) -> None:
        self._oldest.check()
        self._order.check()
        assert len(self._oldest) == len(self._order), "the orders disagree"

    def _is_oldests_turn(self) -> bool:
        return self._passed >= FAIR_EVERY - 1


class Urgent(Fair):
    """The policy `priority`: not only among those who wait, but also against prompts that are under way."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(ByKey(by_priority))

    def goes_before(self, under_way: SequenceState) -> bool:
        """Whether the first gets its first chunk before the next one of a prompt under way.

        The oldest in its turn does, or those behind it would wait for all these prompts, however urgent they are.
        """
        first = self.first()
        return first is not None and (self._is_oldests_turn() or by_priority(first) < by_priority(under_way))
