"""Who of those who wait is admitted next, under each policy, and that nobody waits for ever."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass

import pytest

from minisgl_backend.cache.radix import RadixCache
from minisgl_backend.messages.ids import SequenceId, StepId
from minisgl_backend.messages.tokens import count_tokens, pack_tokens
from minisgl_backend.scheduler.order import FAIR_EVERY, Order, Policy, make_order
from minisgl_backend.scheduler.order_prefix import LongestPrefix, WeightedSubtrees
from minisgl_backend.scheduler.prefix_list import Place, PrefixList, shared_bytes

POLICIES: list[Policy] = ["fcfs", "lpm", "dfs-weight", "priority"]
PAGE = 2


@dataclass
class Someone:
    """A sequence that waits."""

    id: SequenceId
    tokens: bytes
    arrival: int
    priority: int = 0
    namespace: bytes = b""

    @property
    def limit_pages(self) -> int:
        return (count_tokens(self.tokens) - 1) // PAGE


class Bench:
    """An order over a tree without a pool: pages are numbers that nobody else has."""

    def __init__(self, policy: Policy) -> None:
        self.tree = RadixCache(PAGE)
        self.order = make_order(policy, self.tree)
        self.pages = 0
        self.arrivals = 0

    def add(self, tokens: list[int], *, priority: int = 0, namespace: bytes = b"") -> Someone:
        self.arrivals += 1
        someone = Someone(SequenceId(self.arrivals), pack_tokens(tokens), self.arrivals, priority, namespace)
        self.order.push(someone)
        self.order.check()
        return someone

    def admit(self) -> Someone:
        """The first goes, and its whole prompt is cached."""
        someone = self.order.first()
        assert isinstance(someone, Someone) and self.order.first() is someone
        self.order.take(someone)
        self.cache(someone)
        self.order.check()
        return someone

    def cache(self, someone: Someone) -> None:
        whole = count_tokens(someone.tokens) // PAGE
        node, found = self.tree.match(someone.namespace, someone.tokens, whole)
        if whole > len(found):
            key = someone.tokens[len(found) * PAGE * 4 : whole * PAGE * 4]
            pages = array("i", range(self.pages, self.pages + whole - len(found)))
            self.pages += len(pages)
            grown = self.tree.insert(node, key, pages, StepId(0))
            assert grown is not None
            node = grown
        self.tree.unlock(node, StepId(0))
        self.order.cached(someone, whole)

    def admit_all(self) -> list[SequenceId]:
        return [self.admit().id for _ in range(len(self.order))]


def test_fcfs_is_by_arrival_and_a_retracted_sequence_has_its_old_place() -> None:
    bench = Bench("fcfs")
    first, second, third = (bench.add([1, 2, 3]) for _ in range(3))
    assert bench.admit() is first and bench.admit() is second
    bench.order.push(second)
    bench.order.push(first)
    assert bench.admit_all() == [first.id, second.id, third.id]


def test_priority_is_by_priority_and_then_by_arrival() -> None:
    bench = Bench("priority")
    ids = [bench.add([1], priority=priority).id for priority in (2, 0, 1, 0, 2)]
    assert bench.admit_all() == [ids[1], ids[3], ids[2], ids[0], ids[4]]


def test_lpm_takes_the_longest_cached_prefix_and_then_who_came_first() -> None:
    bench = Bench("lpm")
    bench.cache(Someone(SequenceId(99), pack_tokens([1, 2, 3, 4, 5, 6]), 99))
    none, short, long, as_long = (
        bench.add(tokens).id for tokens in ([7, 7, 7], [1, 2, 9, 9], [1, 2, 3, 4, 9], [1, 2, 3, 4, 8])
    )
    assert bench.admit_all() == [long, as_long, short, none]


def test_lpm_sees_what_is_cached_while_they_wait() -> None:
    bench = Bench("lpm")
    first, other, child = (bench.add(tokens).id for tokens in ([1, 2, 3, 4, 5], [8, 8, 8], [1, 2, 3, 4, 6]))
    assert bench.admit_all() == [first, child, other]


def test_lpm_forgets_what_was_evicted_while_they_wait() -> None:
    bench = Bench("lpm")
    bench.cache(Someone(SequenceId(99), pack_tokens([1, 2, 3, 4]), 99))
    bench.cache(Someone(SequenceId(98), pack_tokens([5, 6]), 98))
    gone, there = bench.add([1, 2, 3, 4, 9]).id, bench.add([5, 6, 9]).id
    assert bench.order.first().id == gone  # type: ignore[union-attr]
    bench.tree.evict(2, StepId(0))
    assert bench.admit_all() == [there, gone]


def test_lpm_does_not_see_another_namespace() -> None:
    bench = Bench("lpm")
    bench.cache(Someone(SequenceId(99), pack_tokens([1, 2, 3, 4]), 99, namespace=b"a"))
    other = bench.add([1, 2, 3, 4, 5], namespace=b"b").id
    same = bench.add([1, 2, 3, 4, 5], namespace=b"a").id
    assert bench.admit_all() == [same, other]


def _prompt(chance: random.Random) -> list[int]:
    """Of few tokens, so that many share a prefix."""
    return [chance.randrange(2) for _ in range(chance.randint(1, 12))]


@pytest.mark.parametrize("seed", range(20))
def test_lpm_agrees_with_a_look_at_everybody(seed: int) -> None:
    chance = random.Random(seed)
    bench = Bench("lpm")
    order = LongestPrefix(bench.tree)
    bench.order = order
    waiting: list[Someone] = []
    for _ in range(150):
        if chance.random() < 0.5:
            waiting.append(bench.add(_prompt(chance)))
        elif waiting and chance.random() < 0.3:
            order.remove(waiting.pop(chance.randrange(len(waiting))))
        elif waiting:
            best = max(waiting, key=lambda one: (bench.tree.peek(b"", one.tokens, one.limit_pages).pages, -one.arrival))
            assert bench.admit() is best
            waiting.remove(best)
        order.check()


@pytest.mark.parametrize("seed", range(10))
def test_the_first_of_lpm_really_finds_what_it_is_chosen_for(seed: int) -> None:
    """Also under evictions: nobody goes first for pages that are gone while another finds some."""
    chance = random.Random(seed)
    bench = Bench("lpm")
    order = LongestPrefix(bench.tree)
    bench.order = order
    for _ in range(300):
        if chance.random() < 0.5 or not order:
            bench.add(_prompt(chance))
        else:
            bench.admit()
        bench.tree.evict(chance.randrange(3), StepId(0))
        first = order.first()
        if first is not None:
            found = bench.tree.peek(b"", first.tokens, first.limit_pages).pages
            assert order._found[first.id][0] == found


def test_lpm_looks_at_few_however_many_wait() -> None:
    class Counting(RadixCache):
        peeks = 0

        def peek(self, namespace: bytes, key: bytes, limit_pages: int):  # type: ignore[no-untyped-def]
            Counting.peeks += 1
            return super().peek(namespace, key, limit_pages)

    bench = Bench("lpm")
    bench.tree = Counting(PAGE)
    bench.order = make_order("lpm", bench.tree)
    for number in range(2000):
        bench.add([1, 2, 3, 4, number % 50 + 5, 6, number + 100, 7])
    before = Counting.peeks
    for _ in range(200):
        bench.admit()
        bench.tree.evict(1, StepId(0))
    assert Counting.peeks - before < 200 * 50


def test_dfs_weight_keeps_subtrees_together_and_takes_the_heaviest_first() -> None:
    bench = Bench("dfs-weight")
    bench.order = WeightedSubtrees(bench.tree)  # without the oldest's turns
    tenants = {1: 6, 2: 9, 3: 3}
    queue = [tenant for tenant, number in tenants.items() for _ in range(number)]
    random.Random(1).shuffle(queue)
    tenant_of = {bench.add([tenant, tenant, number % 3, 0, number]).id: tenant for number, tenant in enumerate(queue)}
    assert [tenant_of[id] for id in bench.admit_all()] == [2] * 9 + [1] * 6 + [3] * 3


def test_dfs_weight_finishes_the_innermost_subtree_before_it_climbs() -> None:
    bench = Bench("dfs-weight")
    bench.order = WeightedSubtrees(bench.tree)
    for task in (0, 1, 0, 1, 0):
        for variant in (0, 1):
            bench.add([9, 9, task, task, variant, variant, bench.arrivals])
    taken = [tuple(bench.admit().tokens[8:24:8]) for _ in range(10)]
    runs = [one for one, before in zip(taken, [None, *taken], strict=False) if one != before]
    assert len(runs) == len(set(runs)) == 4, "a subtree was left before it was done"
    assert [task for task, _ in runs][:2] == [0, 0], "the heavier task comes first"


def test_dfs_weight_goes_on_beside_the_oldest_after_its_turn() -> None:
    """What it computed would else be thrown away by the time its relatives come."""
    bench = Bench("dfs-weight")
    relatives = [bench.add([5, 5, number, 5]).id for number in range(3)]
    many = [bench.add([1, 1, number, number, 3]).id for number in range(12)]
    taken = bench.admit_all()
    turn = FAIR_EVERY - 1
    assert sorted(taken[turn : turn + 3]) == relatives and taken[turn] == relatives[0]
    assert sorted(taken) == sorted([*relatives, *many])


def test_dfs_weight_finds_a_heavy_subtree_among_thousands_of_light_ones() -> None:
    bench = Bench("dfs-weight")
    bench.order = WeightedSubtrees(bench.tree)
    for number in range(2000):
        tokens = [7, 7, number] if number % 10 == 0 else [number + 10, number, number]
        bench.add(tokens)
    assert all(bench.admit().tokens[:4] == pack_tokens([7]) for _ in range(200))


@pytest.mark.parametrize("policy", POLICIES)
def test_whoever_left_is_never_first(policy: Policy) -> None:
    bench = Bench(policy)
    waiting = [bench.add([1, 2, number, 4]) for number in range(20)]
    for gone in waiting[::2]:
        bench.order.remove(gone)
        bench.order.check()
    assert sorted(bench.admit_all()) == [one.id for one in waiting[1::2]]
    assert bench.order.first() is None


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_waits_longer_than_the_bound_however_lucky_the_others_are(policy: Policy) -> None:
    """Before the unlucky one wait n older ones; from then on only the lucky arrive, who always would go first."""
    bench = Bench(policy)
    lucky = [1, 2, 3, 4, 5, 6]
    bench.cache(Someone(SequenceId(1000), pack_tokens(lucky), 1000))
    for number in range(5):
        bench.add([50 + number, 9, 9], priority=5)
    unlucky = bench.add([77, 7, 7], priority=9)
    for passed in range(1, 1000):
        bench.add([*lucky, passed], priority=0)
        bench.add([*lucky, passed], priority=0)
        if bench.admit() is unlucky:
            break
    assert passed <= FAIR_EVERY * (5 + 1)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(5))
def test_the_bound_holds_for_everybody_over_random_lives(policy: Policy, seed: int) -> None:
    chance = random.Random(seed)
    bench = Bench(policy)
    latest: dict[SequenceId, int] = {}  # by which admission it must have been the one
    admissions = 0
    for _ in range(600):
        if chance.random() < 0.55:
            older = len(bench.order)
            someone = bench.add(_prompt(chance), priority=chance.randrange(3))
            latest[someone.id] = admissions + FAIR_EVERY * (older + 1)
        elif len(bench.order):
            admissions += 1
            assert admissions <= latest[bench.admit().id]
            bench.tree.evict(chance.randrange(3), StepId(0))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_calls_give_the_same_order(policy: Policy) -> None:
    def run() -> list[SequenceId]:
        chance = random.Random(3)
        bench = Bench(policy)
        for _ in range(60):
            bench.add(_prompt(chance), priority=chance.randrange(3))
        return bench.admit_all()

    assert run() == run()


def test_an_order_counts_who_waits() -> None:
    for policy in POLICIES:
        bench = Bench(policy)
        order: Order = bench.order
        one = bench.add([1, 2, 3])
        bench.add([1, 2, 3])
        assert len(order) == 2
        order.remove(one)
        assert len(order) == 1


def test_shared_bytes_agrees_with_a_look_at_each_byte() -> None:
    chance = random.Random(5)
    for _ in range(500):
        one, other = (bytes(chance.randrange(2) for _ in range(chance.randrange(20))) for _ in range(2))
        other = one[: chance.randrange(20)] + other
        plain = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        assert shared_bytes(one, other) == plain


def test_a_subtree_is_the_range_of_all_that_share_the_pages() -> None:
    chance = random.Random(6)
    prefixes = PrefixList(PAGE)
    places = []
    for number in range(200):
        tokens = pack_tokens(chance.choice((0, 1, 255, 2**31 - 1)) for _ in range(chance.randint(1, 8)))
        places.append(Place(chance.choice((b"", b"a")), tokens, SequenceId(number)))
        prefixes.add(places[-1])
    prefixes.check()
    for place in places:
        for pages in range(-1, count_tokens(place.tokens) // PAGE + 1):
            first, end = prefixes.subtree(place, pages)
            inside = {prefixes[index].id for index in range(first, end)}
            assert inside == {one.id for one in places if prefixes.shared_pages(place, one) >= pages}
            if pages > 0:
                assert prefixes.around(prefixes.find(place), pages, 0, len(prefixes)) == (first, end)
