"""The radix tree against a naive one: a dict from every prefix of whole pages to the last page of it.

After every operation the tree proves its own integrity, and all its sizes are compared with the dict. What is evicted
must be exactly what the dict says: least recently used first, tails before heads, nothing that is locked.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from minisgl_backend.cache.node import RadixNode
from minisgl_backend.cache.radix import Evicted, RadixCache
from minisgl_backend.messages.ids import StepId
from minisgl_backend.messages.tokens import pack_tokens

Prefix = tuple[int, ...]  # symbols, one a page
NAMESPACES = (b"", b"salt", b"other")
Place = tuple[bytes | int, Prefix]  # a number in place of a namespace: hidden
Pick = Callable[[int], int]
"""Chooses one of n: 0 … n - 1."""


@dataclass
class Lock:
    """One sequence: the symbols of its prompt, and how many of its pages it has locked."""

    namespace: bytes | int
    prefix: Prefix
    node: RadixNode


@dataclass
class Page:
    id: int
    used: int  # when it was last unlocked
    step: int  # the last that names it


class RadixAgainstDict(RuleBasedStateMachine):
    @initialize(page_size=st.sampled_from([1, 2, 16]))
    def start(self, page_size: int) -> None:
        self.page_size = page_size
        self.tree = RadixCache(page_size)
        self.pages: dict[Place, Page] = {}
        self.locks: list[Lock] = []
        self.clock = 0
        self.step = 0  # the last that was planned
        self.fresh = 0
        self.hidden = 0

    # ── the naive tree ───────────────────────────────────────────────────────────────────────────────────────────

    def key(self, prefix: Prefix, rest: int = 0) -> bytes:
        """A page of symbol s is s // 2 again and again, and s at its end: pages differ late. `rest`: more tokens."""
        tokens = [token for s in prefix for token in [s // 2] * (self.page_size - 1) + [s]]
        return pack_tokens(tokens + [0] * min(rest, self.page_size - 1))

    def cached(self, namespace: bytes | int, prefix: Prefix, limit: int) -> int:
        """Pages of the longest prefix that is there."""
        count = 0
        while count < min(limit, len(prefix)) and (namespace, prefix[: count + 1]) in self.pages:
            count += 1
        return count

    def ids(self, namespace: bytes | int, prefix: Prefix, start: int = 0) -> list[int]:
        return [self.pages[namespace, prefix[: i + 1]].id for i in range(start, len(prefix))]

    def is_locked(self, namespace: bytes | int, prefix: Prefix) -> bool:
        return any(lock.namespace == namespace and lock.prefix[: len(prefix)] == prefix for lock in self.locks)

    def evictable(self) -> list[Place]:
        """All that may go, in the order in which it should."""
        free = [place for place in self.pages if not self.is_locked(*place)]
        return sorted(free, key=lambda place: (self.pages[place].used, -len(place[1])))

    # ── what may happen ──────────────────────────────────────────────────────────────────────────────────────────

    @rule(data=st.data())
    def one_call(self, data: Any) -> None:
        self.any_call(lambda n: int(data.draw(st.integers(0, n - 1))))

    @rule(seed=st.integers(0, 1 << 30), calls=st.integers(20, 120))
    def storm(self, seed: int, calls: int) -> None:
        """Many in a row: by itself Hypothesis makes short lives that seldom meet."""
        draw = random.Random(seed)
        for _ in range(calls):
            self.any_call(draw.randrange)
            self.is_sound()

    def any_call(self, pick: Pick) -> None:
        calls = [self.match, self.evict, self.evict_under_steps_in_flight]
        if self.locks:
            calls += [self.insert, self.insert, self.follow, self.unlock, self.unlock, self.fail, self.hide]
        elif pick(8) == 0:
            calls = [self.reset]
        calls[pick(len(calls))](pick)

    def some_symbols(self, pick: Pick) -> Prefix:
        return tuple(pick(4) for _ in range(pick(4)))

    def match(self, pick: Pick) -> None:
        """A prompt that begins with something cached, at times with nothing."""
        places = [(namespace, ()) for namespace in NAMESPACES] + list(self.pages)
        space, known = places[pick(len(places))]
        namespace = space if isinstance(space, bytes) else b""  # what is hidden is asked for, too
        prefix = known + self.some_symbols(pick)
        limit = pick(9) if pick(3) == 0 else 99
        found = self.cached(namespace, prefix, limit)
        unlocked = sum(not self.is_locked(namespace, prefix[: i + 1]) for i in range(found))
        key = self.key(prefix, pick(16))
        before = self.tree.counts.splits
        assert self.tree.peek(namespace, key, limit) == (found, unlocked)
        assert self.tree.counts.splits == before, "a peek splits nothing"
        node, pages = self.tree.match(namespace, key, limit)
        assert pages.tolist() == self.ids(namespace, prefix[:found])
        self.locks.append(Lock(namespace, prefix[:found], node))

    def insert(self, pick: Pick) -> None:
        """As a sequence does when its chunk is planned, or its tokens are confirmed."""
        lock = self.locks[pick(len(self.locks))]
        more = (pick(4), *self.some_symbols(pick))
        self.step += pick(2)
        ids = array("i", range(self.fresh, self.fresh + len(more)))
        is_there = (lock.namespace, (*lock.prefix, more[0])) in self.pages
        node = self.tree.insert(lock.node, self.key(more), ids, StepId(self.step))
        assert (node is None) == is_there, "refused when, and only when, its first page is there"
        if node is None:
            return
        self.fresh += len(more)
        for count, id in enumerate(ids, 1):
            self.pages[lock.namespace, lock.prefix + more[:count]] = Page(id, 0, self.step)
        lock.prefix, lock.node = lock.prefix + more, node

    def follow(self, pick: Pick) -> None:
        """As a sequence does that meets pages of others on its way."""
        lock = self.locks[pick(len(self.locks))]
        at = len(lock.prefix)
        beyond = [one for space, one in self.pages if space == lock.namespace and one[:at] == lock.prefix]
        wanted = [lock.prefix, *beyond][pick(1 + len(beyond))] + self.some_symbols(pick)
        limit = pick(13) if pick(3) == 0 else 99
        found = max(at, self.cached(lock.namespace, wanted, limit))
        lock.node, pages = self.tree.follow(lock.node, self.key(wanted), at, limit)
        assert pages.tolist() == self.ids(lock.namespace, wanted[:found], at)
        lock.prefix = wanted[:found]

    def unlock(self, pick: Pick) -> Lock:
        lock = self.locks.pop(pick(len(self.locks)))
        self.clock += 1
        self.step += 1
        self.tree.unlock(lock.node, StepId(self.step))
        for count in range(1, len(lock.prefix) + 1):
            page = self.pages[lock.namespace, lock.prefix[:count]]
            page.step = self.step
            if not self.is_locked(lock.namespace, lock.prefix[:count]):
                page.used = self.clock
        return lock

    def fail(self, pick: Pick) -> None:
        """A sequence whose K/V is not to be trusted: nobody may find what it alone uses."""
        lock = self.unlock(pick)
        gone: list[Place] = []
        prefix = lock.prefix
        while (
            prefix and not self.is_locked(lock.namespace, prefix) and not self.has_child(lock.namespace, prefix, gone)
        ):
            gone.append((lock.namespace, prefix))
            prefix = prefix[:-1]
        self.take_out(self.tree.forget(lock.node), gone)

    def hide(self, pick: Pick) -> None:
        """What somebody has read is poisoned: all that begins with its first page is out of reach from now on, and
        stays with those who use it."""
        lock = self.locks[pick(len(self.locks))]
        self.tree.hide(lock.node)
        if not lock.prefix or isinstance(lock.namespace, int):
            return
        self.hidden += 1
        space, first = lock.namespace, lock.prefix[0]
        for one in self.locks:
            if one.namespace == space and one.prefix[:1] == (first,):
                one.namespace = self.hidden
        for namespace, prefix in list(self.pages):
            if namespace == space and prefix[0] == first:
                self.pages[self.hidden, prefix] = self.pages.pop((namespace, prefix))
        assert self.tree.peek(space, self.key((first,)), 99) == (0, 0)

    def has_child(self, namespace: bytes | int, prefix: Prefix, gone: Seq[Place] = ()) -> bool:
        below = [(namespace, (*prefix, s)) for s in range(4)]
        return any(place in self.pages and place not in gone for place in below)

    def evict(self, pick: Pick) -> None:
        count = 1 + pick(6)
        self.take_out(self.tree.evict(count, StepId(self.step)), self.evictable()[:count])

    def evict_under_steps_in_flight(self, pick: Pick) -> None:
        """What is named by a step in flight comes last; which of it the dict does not say, because steps are kept per
        node. But it is always as much as asked for, never locked, from the tails, and tagged late enough."""
        count, applied = 1 + pick(6), max(0, self.step - pick(5))
        places = {page.id: place for place, page in self.pages.items()}
        free = len(self.evictable())
        evicted = self.tree.evict(count, StepId(applied))
        gone = [places[id] for one in evicted for id in one.pages]
        assert len(gone) == min(count, free)
        self.take_out(evicted, gone)
        assert not any(self.has_child(*place) for place in gone), "a page went before one behind it"

    def reset(self, pick: Pick) -> None:
        self.take_out(self.tree.reset(), list(self.pages))

    @rule()
    def drain(self) -> None:
        """Everybody leaves, and all is evicted page by page: the order must be that of the dict."""
        while self.locks:
            self.unlock(lambda n: n - 1)
        while self.pages:
            self.take_out(self.tree.evict(1, StepId(self.step)), self.evictable()[:1])

    def take_out(self, evicted: list[Evicted], places: list[Place]) -> None:
        assert sorted(id for one in evicted for id in one.pages) == sorted(self.pages[place].id for place in places)
        tags = {id: one.step for one in evicted for id in one.pages}
        for place in places:
            page = self.pages[place]
            assert not self.is_locked(*place), f"page {page.id} was taken from under a lock"
            assert tags[page.id] >= page.step, f"page {page.id} could be handed out before step {page.step}"
            del self.pages[place]

    @invariant()
    def is_sound(self) -> None:
        if not hasattr(self, "tree"):
            return
        self.tree.check([lock.node for lock in self.locks])
        assert sorted(self.tree.pages()) == sorted(page.id for page in self.pages.values())
        assert self.tree.total_pages == len(self.pages)
        assert self.tree.evictable_pages == len(self.evictable())
        self.is_shown()

    def is_shown(self) -> None:
        """Everything once, each node below what it hangs from; of a part the locked ways, then the latest used."""
        ends = [lock.node for lock in self.locks]
        every = self.tree.shown(ends, 1000)
        assert len(every) == len({*every}) == self.tree.num_nodes
        assert sorted(id for node in every for id in node.pages) == sorted(page.id for page in self.pages.values())
        locked = sum(node.locks > 0 for node in every)
        assert all(node.locks for node in every[:locked])
        for most in (0, 1, 3):
            some = self.tree.shown(ends, most)
            assert len(some) <= most and (len(some) == min(most, len(every)) or most > locked)
            for node in some:
                above = node.parent
                assert above is not None and (above.parent is None or above in some[: some.index(node)])


@pytest.mark.slow
def test_the_tree_holds_exactly_what_a_dict_of_prefixes_holds_whatever_happens() -> None:
    some = settings()
    run_state_machine_as_test(
        RadixAgainstDict, settings=settings(some, max_examples=max(100, some.max_examples // 2), stateful_step_count=15)
    )
