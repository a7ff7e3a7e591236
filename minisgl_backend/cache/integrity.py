"""The proof that a radix tree is sound: it walks every node and counts everything anew.

Where it stands in the flow: `RadixCache.check`, called by `Scheduler.check_integrity` after every operation of a test.
Raises AssertionError and changes nothing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

from minisgl_backend.cache.node import RadixNode


def check_radix(
    roots: dict[bytes | int, RadixNode],
    lru: OrderedDict[RadixNode, None],
    unit: int,
    locked: Iterable[RadixNode],
    total_pages: int,
    evictable_pages: int,
    num_nodes: int,
) -> None:
    """unit: bytes of a page's tokens. The other arguments are the tree's books, to be compared with what is there."""
    locks = _locks_of_paths(locked)
    place = {id(node): index for index, node in enumerate(lru)}
    pages = evictable = unlocked = nodes = 0
    seen: set[int] = set()
    for namespace, root in roots.items():
        assert root.namespace == namespace and root.parent is None, f"a wrong root for namespace {namespace!r}"
        assert not root.pages and not root.key, f"the root of namespace {namespace!r} holds pages"
        assert root.children or root.locks, f"namespace {namespace!r} is empty and still there"
        assert root.locks == locks.pop(id(root), 0), f"the root of namespace {namespace!r} has {root.locks} locks"
        for node in _below(root):
            _check_node(node, unit, seen)
            held = locks.pop(id(node), 0)
            assert node.locks == held, f"{_name(node)} has {node.locks} locks, {held} sequences use it"
            pages += len(node.pages)
            nodes += 1
            assert (id(node) in place) == (not node.locks), f"{_name(node)} with {node.locks} locks: listed wrongly"
            if not node.locks:
                evictable += len(node.pages)
                unlocked += 1
                _check_order(node, place)
    assert not locks, f"{len(locks)} nodes are locked, but not in the tree"
    assert unlocked == len(lru), f"{len(lru)} nodes may be evicted, {unlocked} of them are in the tree"
    assert nodes == num_nodes, f"{num_nodes} nodes counted, {nodes} are"
    assert pages == total_pages, f"{total_pages} pages counted, {pages} in the tree"
    assert evictable == evictable_pages, f"{evictable_pages} evictable pages counted, {evictable} in the tree"


def _locks_of_paths(locked: Iterable[RadixNode]) -> Counter[int]:
    """How many of the paths from `locked` nodes to their roots pass each node."""
    locks: Counter[int] = Counter()
    for end in locked:
        node: RadixNode | None = end
        while node is not None:
            locks[id(node)] += 1
            node = node.parent
    return locks


def _below(root: RadixNode) -> Iterator[RadixNode]:
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def _check_node(node: RadixNode, unit: int, seen: set[int]) -> None:
    assert node.pages, f"{_name(node)} holds nothing"
    assert len(node.key) == len(node.pages) * unit, f"{_name(node)} has {len(node.key)} bytes of tokens"
    for page in node.pages:
        assert page not in seen, f"page {page} is in the tree twice"
        seen.add(page)
    assert node.parent is not None
    assert node.parent.children.get(bytes(node.key[:unit])) is node, f"{_name(node)} is not found by its first page"
    for child in node.children.values():
        assert child.parent is node, f"{_name(child)} does not know the node above it"
        assert child.locks <= node.locks, f"{_name(child)} has more locks than the node above it"


def _check_order(node: RadixNode, place: dict[int, int]) -> None:
    """Times grow towards the root: the last use, and the last step that names a page."""
    parent = node.parent
    if parent is not None and parent.parent is not None and not parent.locks:
        assert place[id(node)] < place[id(parent)], f"{_name(node)} would be evicted after the node above it"
        assert node.step <= parent.step, f"{_name(node)} is named by step {node.step}, the node above by {parent.step}"


def _name(node: RadixNode) -> str:
    return f"node of pages {node.pages[:8].tolist()}"
