"""Every order against its definition, worked out anew each time; and the bound on waiting that `Fair` promises."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from minisgl_backend.cache.node import RadixNode
from minisgl_backend.cache.radix import RadixCache
from minisgl_backend.messages.ids import SequenceId, StepId
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.scheduler.order import FAIR_EVERY, Policy, make_order
from minisgl_backend.scheduler.order_prefix import WeightedSubtrees

NAMESPACES = (b"", b"salt")
APPLIED = StepId(1 << 40)


@dataclass(eq=False)
class Queued:
    id: SequenceId
    arrival: int
    priority: int
    namespace: bytes
    tokens: bytes
    limit_pages: int
    turns: int = 0  # admissions that it has seen
    patience: int = 0  # at most so many, while nobody older comes back


class OrderAgainstItsDefinition(RuleBasedStateMachine):
    """Sequences come, are admitted, put their pages into the tree, leave, are retracted; pages are evicted."""

    @initialize(
        policy=st.sampled_from(["fcfs", "priority", "lpm", "dfs-weight"]), page_size=st.sampled_from([1, 2, 16])
    )
    def start(self, policy: Policy, page_size: int) -> None:
        self.policy = policy
        self.tree = RadixCache(page_size)
        self.order = make_order(policy, self.tree)
        self.waiting: list[Queued] = []
        self.running: list[tuple[Queued, RadixNode]] = []
        self.arrivals = self.pages = self.passed = 0

    def enter(self, state: Queued) -> None:
        older = [one for one in self.waiting if one.arrival < state.arrival]
        state.turns, state.patience = 0, FAIR_EVERY * (len(older) + 1)
        for one in self.waiting:
            if one.arrival > state.arrival:
                one.patience += FAIR_EVERY
        self.waiting.append(state)
        self.order.push(state)

    @precondition(
        lambda self: len(self.waiting) < 12
    )  # more than the orders look at is a matter of speed, not of order
    @rule(
        pages=st.lists(st.integers(0, 2), min_size=1, max_size=5),
        priority=st.integers(-2, 2),
        namespace=st.sampled_from(NAMESPACES),
        copies=st.integers(1, 3),
    )
    def arrive(self, pages: list[int], priority: int, namespace: bytes, copies: int) -> None:
        for _ in range(copies):
            self.arrivals += 1
            tokens = pack_tokens([symbol for symbol in pages for _ in range(self.tree.page_size)] + [7])
            self.enter(Queued(SequenceId(self.arrivals), self.arrivals, priority, namespace, tokens, len(pages)))

    @precondition(lambda self: self.waiting)
    @rule(times=st.integers(1, 3))
    def admit(self, times: int) -> None:
        for _ in range(min(times, len(self.waiting))):
            state = self.order.first()
            assert isinstance(state, Queued)
            self.order.take(state)
            self.passed = 0 if state is self.oldest() else self.passed + 1
            self.waiting.remove(state)
            for one in self.waiting:
                one.turns += 1
            self.run(state)

    def run(self, state: Queued) -> None:
        """Its whole pages enter the tree, as they do when its prompt is planned."""
        unit = self.tree.page_size * 4
        node, found = self.tree.match(state.namespace, state.tokens, state.limit_pages)
        count = state.limit_pages - len(found)
        if count:
            ids = array("i", range(self.pages, self.pages + count))
            self.pages += count
            grown = self.tree.insert(node, state.tokens[len(found) * unit : state.limit_pages * unit], ids, StepId(1))
            assert grown is not None
            node = grown
        self.order.cached(state, state.limit_pages)
        self.running.append((state, node))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), retract=st.booleans())
    def leave(self, data: Any, retract: bool) -> None:
        state, node = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.tree.unlock(node, StepId(1))
        if retract:
            self.enter(state)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        state = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(state)
        self.order.remove(state)

    @rule(count=st.integers(1, 9))
    def evict(self, count: int) -> None:
        self.tree.evict(count, APPLIED)

    @rule()
    def reset(self) -> None:
        """As after a step that failed."""
        while self.running:
            self.leave_all()
        self.tree.evict(max(1, self.tree.total_pages), APPLIED)

    def leave_all(self) -> None:
        state, node = self.running.pop()
        self.tree.unlock(node, StepId(1))
        self.enter(state)

    def oldest(self) -> Queued:
        return min(self.waiting, key=lambda one: one.arrival)

    def found(self, state: Queued) -> int:
        return self.tree.peek(state.namespace, state.tokens, state.limit_pages).pages

    @invariant()
    def the_first_is_who_it_should_be(self) -> None:
        if not hasattr(self, "order"):
            return
        self.order.check()
        assert len(self.order) == len(self.waiting)
        first = self.order.first()
        if not self.waiting:
            assert first is None
            return
        assert isinstance(first, Queued) and first in self.waiting
        if self.policy != "fcfs" and self.passed >= FAIR_EVERY - 1:
            assert first is self.oldest(), "it is the oldest's turn"
        elif self.policy == "fcfs":
            assert first is self.oldest()
        elif self.policy == "priority":
            assert first is min(self.waiting, key=lambda one: (one.priority, one.arrival))
        elif self.policy == "lpm":
            assert first is min(self.waiting, key=lambda one: (-self.found(one), one.arrival))

    @invariant()
    def nobody_waits_longer_than_promised(self) -> None:
        for one in getattr(self, "waiting", ()):
            assert one.turns < one.patience, f"sequence {one.id} has seen {one.turns} admissions of others"


@pytest.mark.slow
def test_each_order_puts_first_whom_its_definition_names_and_lets_nobody_starve() -> None:
    some = settings()
    run_state_machine_as_test(
        OrderAgainstItsDefinition, settings=settings(some, max_examples=max(200, some.max_examples))
    )


prompts = st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=24)


@given(prompts=prompts, page_size=st.sampled_from([1, 2]), salted=st.booleans())
def test_dfs_weight_finishes_each_subtree_before_it_enters_another(
    prompts: Seq[list[int]], page_size: int, salted: bool
) -> None:
    """So each prefix is computed once, whatever stays in the cache: who shares it comes without a gap."""
    order = WeightedSubtrees(RadixCache(page_size))
    for number, symbols in enumerate(prompts, 1):
        tokens = pack_tokens([symbol for symbol in symbols for _ in range(page_size)] + [9])
        namespace = NAMESPACES[number % 2] if salted else b""
        order.push(Queued(SequenceId(number), number, 0, namespace, tokens, len(symbols)))
    taken: list[tuple[bytes, tuple[int, ...]]] = []
    while (state := order.first()) is not None:
        order.take(state)
        taken.append((state.namespace, tuple(prompts[state.id - 1])))
    assert len(taken) == len(prompts)
    for namespace in NAMESPACES:
        for symbols in prompts:
            for length in range(1, len(symbols) + 1):
                wanted = tuple(symbols[:length])
                places = [i for i, (space, one) in enumerate(taken) if space == namespace and one[:length] == wanted]
                assert not places or places == list(range(places[0], places[-1] + 1)), (
                    f"{wanted} is left and re-entered"
                )
