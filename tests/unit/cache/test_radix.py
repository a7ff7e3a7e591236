"""The radix cache: what is found, who locks it, what is given up first. `Cache` proves integrity after each call."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Iterable

import pytest

from minisgl_backend.cache.node import RadixNode, shared_bytes
from minisgl_backend.cache.radix import Evicted, Peek, RadixCache
from minisgl_backend.messages.ids import StepId
from minisgl_backend.messages.tokens import pack_tokens, unpack_tokens

PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 2, 3, 16])


class Cache:
    """A tree with a list of the locks that callers hold, and pages numbered as they come."""

    def __init__(self, page_size: int) -> None:
        self.tree = RadixCache(page_size)
        self.size = page_size
        self.locks: list[RadixNode] = []
        self._next_page = 0

    def fresh(self, count: int) -> array[int]:
        self._next_page += count
        return array("i", range(self._next_page - count, self._next_page))

    def key(self, pages: Iterable[int]) -> bytes:
        """One page of equal tokens for each number."""
        return pack_tokens(page for page in pages for _ in range(self.size))

    def match(self, pages: str, limit: int = 99, namespace: bytes = b"") -> tuple[RadixNode, list[int]]:
        node, found = self.tree.match(namespace, self.key(map(ord, pages)), limit)
        self.locks.append(node)
        self.check()
        return node, found.tolist()

    def insert(self, node: RadixNode, pages: str, step: int = 0) -> RadixNode | None:
        grown = self.tree.insert(node, self.key(map(ord, pages)), self.fresh(len(pages)), StepId(step))
        if grown is not None:
            self.locks.remove(node)
            self.locks.append(grown)
        self.check()
        return grown

    def put(self, pages: str, step: int = 0, namespace: bytes = b"") -> RadixNode:
        """A sequence that came, inserted all its pages, and still runs."""
        node, found = self.match(pages, namespace=namespace)
        if len(found) < len(pages):
            grown = self.insert(node, pages[len(found) :], step)
            assert grown is not None
            node = grown
        return node

    def unlock(self, node: RadixNode, step: int = 0) -> None:
        self.locks.remove(node)
        self.tree.unlock(node, StepId(step))
        self.check()

    def evict(self, count: int, applied: int = 1000) -> list[int]:
        evicted = self.tree.evict(count, StepId(applied))
        self.check()
        return [page for one in evicted for page in one.pages]

    def peek(self, pages: str, limit: int = 99, namespace: bytes = b"") -> Peek:
        return self.tree.peek(namespace, self.key(map(ord, pages)), limit)

    def check(self) -> None:
        self.tree.check(self.locks)


@PAGE_SIZES
def test_a_prefix_that_was_inserted_is_found_page_by_page(page_size: int) -> None:
    cache = Cache(page_size)
    cache.unlock(cache.put("system"))
    for text, found in (("system", 6), ("systematic", 6), ("syntax", 2), ("s", 1), ("x", 0)):
        node, pages = cache.match(text)
        assert pages == list(range(found))
        cache.unlock(node)


@PAGE_SIZES
def test_a_match_ends_at_its_limit_and_never_uses_a_part_of_a_page(page_size: int) -> None:
    cache = Cache(page_size)
    cache.unlock(cache.put("abcdef"))
    assert cache.match("abcdef", limit=4)[1] == [0, 1, 2, 3]
    assert cache.match("abcdef", limit=0)[1] == []
    part = cache.key(map(ord, "abc"))[:-4]
    node, pages = cache.tree.match(b"", part, 99)
    assert len(pages) == 2
    cache.locks.append(node)
    cache.check()


def test_a_split_makes_a_new_upper_node_and_the_lower_keeps_identity_and_lock() -> None:
    cache = Cache(2)
    running = cache.put("abcdef")
    other, pages = cache.match("abcxyz")
    assert pages == [0, 1, 2]
    assert running.parent is other and running.pages.tolist() == [3, 4, 5]
    assert (other.locks, running.locks) == (2, 1)
    cache.unlock(running)
    assert (other.locks, running.locks) == (1, 0)
    cache.unlock(other)


@PAGE_SIZES
def test_a_leaf_grows_in_place_only_while_its_owner_alone_locks_it(page_size: int) -> None:
    cache = Cache(page_size)
    first = cache.put("ab")
    assert cache.insert(first, "c") is first
    second, pages = cache.match("abc")
    assert second is first and pages == [0, 1, 2]
    grown = cache.insert(first, "d")
    assert grown is not None and grown is not first and grown.parent is first
    beside = cache.insert(second, "e")
    assert beside is not None and beside.parent is first
    cache.unlock(grown)
    assert cache.insert(beside, "f") is beside
    assert cache.tree.counts.splits == 0


def test_thousands_of_tokens_of_one_sequence_are_one_node_with_pages_of_one_token() -> None:
    cache = Cache(1)
    node = cache.put("a")
    for token in range(2000):
        grown = cache.tree.insert(node, pack_tokens([token]), cache.fresh(1), StepId(0))
        assert grown is node
    cache.check()
    assert len(node.pages) == 2001


def test_a_page_that_is_here_already_is_not_inserted_again_and_follow_leads_there() -> None:
    cache = Cache(2)
    root_of_both = cache.put("sys")
    one, _ = cache.match("sys")
    grown = cache.insert(one, "abc")
    assert grown is not None
    before = cache.tree.total_pages
    assert cache.insert(root_of_both, "abd") is None
    assert cache.tree.total_pages == before
    node, pages = cache.tree.follow(root_of_both, cache.key(map(ord, "sysabd")), 3, 99)
    cache.locks.remove(root_of_both)
    cache.locks.append(node)
    cache.check()
    assert pages.tolist() == grown.parent.pages.tolist() if grown.parent else False
    assert len(pages) == 2 and cache.insert(node, "d") is not None


def test_only_unlocked_pages_are_evicted_and_those_below_go_before_those_above() -> None:
    cache = Cache(2)
    running = cache.put("ab")
    cache.unlock(cache.put("abcd"))
    cache.unlock(cache.put("abce"))
    assert cache.tree.evictable_pages == 3
    assert cache.evict(99) == [3, 4, 2]
    assert cache.evict(1) == []
    cache.unlock(running)
    assert sorted(cache.evict(99)) == [0, 1]
    assert cache.tree.total_pages == 0


def test_the_least_recently_used_leaf_goes_first_and_a_peek_is_no_use() -> None:
    cache = Cache(1)
    for text in ("aa", "bb", "cc"):
        cache.unlock(cache.put(text))
    cache.unlock(cache.match("aa")[0])
    cache.peek("bb")
    assert cache.evict(2) == [2, 3]
    assert cache.evict(2) == [4, 5]
    assert cache.evict(9) == [0, 1]


def test_a_leaf_is_evicted_from_its_tail_no_further_than_needed() -> None:
    cache = Cache(4)
    cache.unlock(cache.put("abcdef"))
    assert cache.evict(2) == [4, 5]
    assert cache.peek("abcdef") == Peek(4, 4)
    assert cache.evict(1) == [3]
    assert cache.match("abcdef")[1] == [0, 1, 2]


def test_a_prefix_used_last_through_one_branch_outlives_the_other_branch() -> None:
    cache = Cache(1)
    cache.unlock(cache.put("sxy"))
    cache.unlock(cache.put("spq"))
    cache.unlock(cache.match("sxy")[0])
    assert cache.evict(2) == [3, 4]
    assert cache.peek("sxy").pages == 3


def test_pages_of_an_unapplied_step_are_evicted_last_and_carry_its_number() -> None:
    cache = Cache(1)
    cache.unlock(cache.put("ab", step=7), step=7)
    cache.unlock(cache.put("cd", step=3), step=3)
    evicted = cache.tree.evict(3, StepId(5))
    cache.check()
    assert evicted == [Evicted(array("i", [2, 3]), StepId(3)), Evicted(array("i", [1]), StepId(7))]


def test_a_reader_in_flight_protects_the_pages_above_it_as_well() -> None:
    """The unlock tags the whole way: a step that reads the prefix is still to run."""
    cache = Cache(1)
    cache.unlock(cache.put("ab", step=1), step=1)
    reader, _ = cache.match("abc")
    cache.unlock(reader, step=9)
    assert cache.tree.evict(1, StepId(8)) == [Evicted(array("i", [1]), StepId(9))]


def test_namespaces_share_nothing_and_empty_ones_are_gone() -> None:
    cache = Cache(2)
    cache.unlock(cache.put("abc", namespace=b"tenant"))
    assert cache.peek("abc") == Peek(0, 0)
    assert cache.peek("abc", namespace=b"tenant") == Peek(3, 3)
    node, pages = cache.match("abc", namespace=b"other")
    assert pages == [] and node.namespace == b"other"
    cache.unlock(node)
    assert cache.evict(3) == [0, 1, 2]
    assert not cache.tree._roots


def test_a_peek_tells_what_a_match_would_find_and_how_much_of_it_is_locked() -> None:
    cache = Cache(2)
    cache.unlock(cache.put("abcdef"))
    running, _ = cache.match("abc")
    assert cache.peek("abcdxx") == Peek(4, 1)
    assert cache.peek("abcdef", limit=3) == Peek(3, 0)
    nodes = cache.tree.counts.splits
    cache.unlock(running)
    assert cache.peek("ab") == Peek(2, 2)
    assert cache.tree.counts.splits == nodes, "a peek splits nothing"


def test_what_a_failed_sequence_leaves_is_forgotten_up_to_what_others_use() -> None:
    cache = Cache(1)
    other = cache.put("sys")
    bad = cache.put("sysbad")
    cache.unlock(bad)
    assert cache.tree.forget(bad) == [Evicted(array("i", [3, 4, 5]), StepId(0))]
    cache.check()
    assert cache.peek("sysbad").pages == 3
    cache.unlock(other)


def test_a_reset_gives_everything_back_with_its_steps_and_refuses_under_a_lock() -> None:
    cache = Cache(2)
    node = cache.put("ab", step=4)
    with pytest.raises(AssertionError, match="under somebody's lock"):
        cache.tree.reset()
    cache.unlock(node, step=4)
    cache.unlock(cache.put("abc", namespace=b"x"))
    evicted = cache.tree.reset()
    cache.check()
    assert sorted(page for one in evicted for page in one.pages) == [0, 1, 2, 3, 4]
    assert (cache.tree.total_pages, cache.tree.evictable_pages) == (0, 0)
    cache.unlock(cache.put("ab"))


def test_the_integrity_check_really_looks() -> None:
    def ruined(ruin: str) -> Cache:
        cache = Cache(2)
        cache.unlock(cache.put("abcd"))
        cache.unlock(cache.put("abxy"))
        node = next(iter(cache.tree._lru))
        exec(ruin, {"tree": cache.tree, "node": node, "up": node.parent})
        return cache

    for ruin, says in (
        ("node.locks += 1", "locks"),
        ("node.pages[0] = up.pages[0]", "twice"),
        ("del node.pages[-1]", "bytes of tokens"),
        ("node.key[0] ^= 1", "not found by its first page"),
        ("tree.total_pages += 1", "pages counted"),
        ("tree.evictable_pages -= 1", "evictable pages counted"),
        ("tree._lru.move_to_end(node)", "after the node above"),
        ("node.step = 5", "named by step 5"),
        ("del tree._lru[node]", "listed wrongly"),
        ("node.parent = None", "does not know|not found"),
    ):
        with pytest.raises(AssertionError, match=says):
            ruined(ruin).check()


@PAGE_SIZES
def test_a_tree_of_random_prompts_finds_what_a_dictionary_of_prefixes_finds(page_size: int) -> None:
    draw = random.Random(page_size)
    cache = Cache(page_size)
    known: dict[str, int] = {}  # prefix → its last page
    running: list[RadixNode] = []
    for _ in range(300):
        text = "".join(draw.choice("ab") for _ in range(draw.randrange(1, 12)))
        prefixes = [text[: end + 1] for end in range(len(text))]
        expected = [known[prefix] for prefix in prefixes if prefix in known]
        assert cache.peek(text).pages == len(expected)
        node, pages = cache.match(text)
        assert pages == expected
        if len(pages) < len(text):
            grown = cache.insert(node, text[len(pages) :])
            assert grown is not None
            node = grown
            for prefix, page in zip(prefixes[len(pages) :], node.pages[-(len(text) - len(pages)) :], strict=True):
                known[prefix] = page
        running.append(node)
        if draw.random() < 0.7:
            cache.unlock(running.pop(draw.randrange(len(running))))
        if draw.random() < 0.2:
            gone = set(cache.evict(draw.randrange(1, 5)))
            known = {prefix: page for prefix, page in known.items() if page not in gone}
        assert set(known.values()) == set(cache.tree.pages())


@pytest.mark.parametrize("same", [0, 1, 7, 499, 500])
def test_the_shared_part_of_two_runs_is_found_by_halving(same: int) -> None:
    edge = bytearray(b"\x01\x02\x03\x04" * 500)
    key = bytes(12) + bytes(edge[: same * 4]) + bytes([9] * 4 * (500 - same))
    assert shared_bytes(key, 12, edge, 4, len(edge)) == same * 4


def test_a_hundred_thousand_tokens_are_compared_in_blocks() -> None:
    """The order of magnitude only: token by token, on the same machine, takes three hundred times as long."""
    cache = RadixCache(16)
    key = pack_tokens(range(100_000))
    node, _ = cache.match(b"", key, 99_999)
    grown = cache.insert(node, key, array("i", range(6250)), StepId(0))
    assert grown is not None

    def seconds(work: Callable[[], object]) -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    tokens = unpack_tokens(key)
    in_blocks, one_by_one = [], []
    for _ in range(5):
        in_blocks += [seconds(lambda: cache.peek(b"", key, 6250)) for _ in range(4)]
        one_by_one.append(seconds(lambda: all(token == index for index, token in enumerate(tokens))))
    assert cache.peek(b"", key, 6250).pages == 6250 and min(in_blocks) < min(one_by_one) / 10


def test_what_is_hidden_is_found_by_nobody_kept_by_its_users_and_evicted_in_its_turn() -> None:
    cache = Cache(1)
    user, bad = cache.put("sysuse"), cache.put("sysbad")
    cache.unlock(cache.put("sysold"))
    cache.unlock(cache.put("other"))
    cache.unlock(bad)
    cache.tree.hide(bad)
    cache.tree.hide(bad)
    cache.check()
    assert cache.peek("sysuse").pages == cache.peek("sysold").pages == 0 and cache.peek("other").pages == 5
    assert cache.tree.counts.hidden == 1, "once is enough"
    assert cache.tree.evict(100, StepId(0)) and cache.tree.total_pages == len("sysuse")
    cache.check()
    again = cache.put("sysuse")
    cache.check()
    cache.unlock(again)
    cache.unlock(user)
    cache.check()
    assert sum(len(one.pages) for one in cache.tree.evict(100, StepId(0))) == 2 * len("sysuse")
    cache.check()


def test_nothing_is_hidden_of_who_has_nothing_in_the_tree() -> None:
    cache = Cache(2)
    node, _ = cache.match("ab")
    cache.unlock(node)
    cache.tree.hide(node)
    cache.check()
    assert cache.tree.counts.hidden == 0
