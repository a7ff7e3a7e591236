"""The radix cache: which prefixes of tokens have their K/V in which pages, shared by whoever asks for them.

Where it stands in the flow: `scheduler/` matches and locks a prefix when it admits a sequence, inserts pages while it
plans and confirms, unlocks when the sequence is let go, and evicts when pages run out. The tree owns the pages in it;
page ids only are kept here, never memory. After the RadixAttention of SGLang (Zheng et al., 2024).

                  root of a namespace
                 /                   \\
        [sys][tem]  locks 2           [hel]  locks 0 ─┐
         /       \\                                    ├─ in the order of `_lru`: a node after all that is below it,
    [you]         [me,][two]  locks 0 ────────────────┘  so the first is always a leaf, and the least recently used
    locks 1: its sequence's own leaf, which grows in place

An edge holds whole pages. Children are found by their first page, so two edges never share one.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from minisgl_backend.cache.integrity import check_radix
from minisgl_backend.cache.node import TOKEN_BYTES, RadixNode, shared_bytes
from minisgl_backend.messages.ids import StepId


class Peek(NamedTuple):
    """What a match would find."""

    pages: int
    unlocked_pages: int  # of them, those that could be evicted at present


class Evicted(NamedTuple):
    """Pages that the tree gave up; they are the caller's now."""

    pages: array[int]
    step: StepId  # the last that names them


@dataclass(slots=True)
class RadixCounts:
    """What the tree has done since the start."""

    matches: int = 0  # calls of match
    matched_pages: int = 0  # found by match and follow
    inserted_pages: int = 0
    evicted_pages: int = 0  # those that were forgotten or went with a reset included
    visited_nodes: int = 0  # edges that were looked at by match, follow and peek
    splits: int = 0
    made_nodes: int = 0
    removed_nodes: int = 0
    hidden: int = 0  # calls of hide that found something


_NOBODY: Mapping[RadixNode, int] = {}


class RadixCache:
    """A prefix tree over pages of `page_size` tokens. Keys are packed tokens; a part of a page is never looked at."""

    __slots__ = ("_lru", "_roots", "_unit", "counts", "evictable_pages", "page_size", "total_pages")

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.total_pages = 0
        self.evictable_pages = 0  # of unlocked nodes
        self.counts = RadixCounts()
        self._unit = page_size * TOKEN_BYTES
        self._roots: dict[bytes | int, RadixNode] = {}  # by namespace; none is empty and unlocked. Numbers: see hide
        self._lru: OrderedDict[RadixNode, None] = OrderedDict()  # all unlocked nodes but roots

    # ── finding ──────────────────────────────────────────────────────────────────────────────────────────────────

    def peek(self, namespace: bytes, key: bytes, limit_pages: int, leaving: Mapping[RadixNode, int] = _NOBODY) -> Peek:
        """What `match` would find. Splits nothing, locks nothing, and is no use in the sense of eviction.

        `leaving`: locks that are to be thought away.
        """
        root = self._roots.get(namespace)
        if root is None:
            return Peek(0, 0)
        path, part = self._walk(root, key, 0, limit_pages)
        pages = unlocked = 0
        for node in path:
            held = part if part and node is path[-1] else len(node.pages)
            pages += held
            if node.locks == leaving.get(node, 0):
                unlocked += held
        return Peek(pages, unlocked)

    def match(self, namespace: bytes, key: bytes, limit_pages: int) -> tuple[RadixNode, array[int]]:
        """The longest prefix of `key` that is here, at most `limit_pages`, locked for the caller.

        Returns the node where it ends, to be given to `unlock` once, and its pages (a copy). With nothing found that
        is the namespace's root.
        """
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = RadixNode(None, bytearray(), array("i"), StepId(0))
            root.namespace = namespace
        root.locks += 1
        self.counts.matches += 1
        return self.follow(root, key, 0, limit_pages)

    def follow(self, node: RadixNode, key: bytes, at_page: int, limit_pages: int) -> tuple[RadixNode, array[int]]:
        """Goes on from `node`, locked by the caller for the first `at_page` pages of `key`, as far as `limit_pages`.

        The caller's lock moves to the node that is returned, with the pages from `at_page` on that were found.
        """
        pages: array[int] = array("i")
        path, part = self._walk(node, key, at_page, limit_pages)
        if not path:
            return node, pages
        if part:
            path[-1] = self._split(path[-1], part)
        for entered in path:
            pages.extend(entered.pages)
            if not entered.locks:
                self._lru.pop(entered, None)  # the upper half of a split is not listed yet
                self.evictable_pages -= len(entered.pages)
            entered.locks += 1
        self.counts.matched_pages += len(pages)
        return path[-1], pages

    def _walk(self, node: RadixNode, key: bytes, at_page: int, limit_pages: int) -> tuple[list[RadixNode], int]:
        """The nodes below `node` along `key`, and how many pages of the last one match: 0 when all do."""
        unit = self._unit
        at, end = at_page * unit, min(limit_pages * unit, len(key) - len(key) % unit)
        path: list[RadixNode] = []
        part = 0
        while at < end:
            child = node.children.get(key[at : at + unit])
            if child is None:
                break
            path.append(child)
            edge = child.key
            if at + len(edge) > end or not key.startswith(edge, at):
                part = shared_bytes(key, at, edge, unit, min(len(edge), end - at)) // unit
                break
            at += len(edge)
            node = child
        self.counts.visited_nodes += len(path)
        return path, part

    def _split(self, lower: RadixNode, count: int) -> RadixNode:
        """Puts the first `count` pages of a node into a new one above it, which the caller locks at once.

        The lower one keeps its identity: sequences point to it, and their locks hold both.
        """
        parent, cut = lower.parent, count * self._unit
        assert parent is not None and 0 < count < len(lower.pages), "a split needs two parts"
        upper = RadixNode(parent, lower.key[:cut], lower.pages[:count], lower.step)
        upper.locks = lower.locks
        self._number(upper)
        del lower.key[:cut]
        del lower.pages[:count]
        lower.parent = upper
        upper.children[bytes(lower.key[: self._unit])] = lower
        parent.children[bytes(upper.key[: self._unit])] = upper
        self.counts.splits += 1
        return upper

    # ── growing ──────────────────────────────────────────────────────────────────────────────────────────────────

    def insert(self, node: RadixNode, key: bytes, pages: array[int], step: StepId) -> RadixNode | None:
        """Puts `pages` (copied), with the tokens `key`, behind `node`, where the caller's lock is.

        `step` is the last that names them. The lock moves to the node returned. None, and nothing changed, when the
        first of the pages is here already: `follow` leads there.
        """
        assert len(key) == len(pages) * self._unit and pages, f"{len(key)} bytes of tokens for {len(pages)} pages"
        if not node.children and node.locks == 1 and node.parent is not None:
            # A leaf that only its owner uses: with pages of one token, each token would become a node otherwise.
            node.key += key
            node.pages += pages
            node.step = max(node.step, step)
            grown = node
        else:
            first = key[: self._unit]
            if first in node.children:
                return None
            grown = RadixNode(node, bytearray(key), pages[:], step)
            grown.locks = 1
            self._number(grown)
            node.children[first] = grown
        self.total_pages += len(pages)
        self.counts.inserted_pages += len(pages)
        return grown

    # ── letting go ───────────────────────────────────────────────────────────────────────────────────────────────

    def unlock(self, node: RadixNode, step: StepId) -> None:
        """Ends a lock. `step` is the last that names the pages up to `node` for the caller."""
        at: RadixNode | None = node
        while at is not None:
            parent = at.parent
            at.locks -= 1
            if step > at.step:  # so never an earlier one above a later one: who locks a node locks those above it
                at.step = step
            if not at.locks:
                if parent is not None:  # from the leaf up: what is below a node stands before it
                    self._lru[at] = None
                    self.evictable_pages += len(at.pages)
                else:
                    self._drop_empty_root(at)
            at = parent

    def evict(self, count: int, applied: StepId) -> list[Evicted]:
        """Gives up to `count` pages back: least recently used first, from the tails of the leaves.

        What a step after `applied` still names comes last: the caller can not hand it out yet.
        """
        evicted = self._evict_upto(count, applied)
        missing = count - sum(len(one.pages) for one in evicted)
        if missing and self._lru:
            evicted += self._evict_upto(missing, None)
        return evicted

    def _evict_upto(self, count: int, applied: StepId | None) -> list[Evicted]:
        """`applied`: only what this step and those before it name, else whatever there is.

        A node carries the latest step of all below it, so what is below a chosen one was chosen before it.
        """
        chosen: list[RadixNode] = []
        found = 0
        for node in self._lru:
            if found >= count:
                break
            if applied is None or node.step <= applied:
                chosen.append(node)
                found += len(node.pages)
        evicted = []
        for node in chosen:
            pages = node.pages
            if found > count and node is chosen[-1]:
                pages = self._cut_tail(node, len(pages) - (found - count))
            else:
                self._remove(node)
            evicted.append(Evicted(pages, node.step))
        freed = min(found, count)
        self.total_pages -= freed
        self.evictable_pages -= freed
        self.counts.evicted_pages += freed
        return evicted

    def hide(self, node: RadixNode) -> None:
        """Nobody finds the way to `node` any more: its K/V is not to be trusted, nor what hangs below its first page.

        Who has locked some of it keeps it. It moves below a root of its own, whose namespace nobody can ask for, and is
        evicted in its turn.
        """
        top, root = node, node.parent
        while root is not None and root.parent is not None:
            top, root = root, root.parent
        if root is None or isinstance(root.namespace, int):
            return  # nothing is cached of it, or it was hidden for somebody before
        self.counts.hidden += 1
        hidden = self._roots[self.counts.hidden] = RadixNode(None, bytearray(), array("i"), StepId(0))
        hidden.namespace = self.counts.hidden
        hidden.locks = top.locks
        root.locks -= top.locks
        first = bytes(top.key[: self._unit])
        hidden.children[first] = root.children.pop(first)
        top.parent = hidden
        self._drop_empty_root(root)

    def forget(self, node: RadixNode) -> list[Evicted]:
        """Gives back what nobody else uses of the way to `node`, after its `unlock`: no use in keeping it."""
        evicted = []
        while node.parent is not None and not node.locks and not node.children:
            parent = node.parent
            evicted.append(Evicted(node.pages, node.step))
            self.total_pages -= len(node.pages)
            self.evictable_pages -= len(node.pages)
            self.counts.evicted_pages += len(node.pages)
            self._remove(node)
            node = parent
        return evicted

    def reset(self) -> list[Evicted]:
        """Forgets everything. No node may be locked."""
        assert not any(root.locks for root in self._roots.values()), "a reset under somebody's lock"
        evicted = [Evicted(node.pages, node.step) for node in self._lru]
        for node in self._lru:  # no cycles are left to the garbage collector
            node.parent = None
            node.children.clear()
        self._lru.clear()
        self._roots.clear()
        self.counts.evicted_pages += self.total_pages
        self.counts.removed_nodes = self.counts.made_nodes
        self.total_pages = self.evictable_pages = 0
        return evicted

    def _cut_tail(self, leaf: RadixNode, count: int) -> array[int]:
        """The last `count` pages of a leaf, the one at the end first to go."""
        pages = leaf.pages[-count:]
        del leaf.pages[-count:]
        del leaf.key[-count * self._unit :]
        return pages

    def _remove(self, leaf: RadixNode) -> None:
        parent = leaf.parent
        assert parent is not None and not leaf.children, "only leaves are evicted"
        del parent.children[bytes(leaf.key[: self._unit])]
        del self._lru[leaf]
        self.counts.removed_nodes += 1
        leaf.parent = None
        if parent.parent is None:
            self._drop_empty_root(parent)

    def _drop_empty_root(self, root: RadixNode) -> None:
        if not root.locks and not root.children:
            del self._roots[root.namespace]

    def _number(self, node: RadixNode) -> None:
        self.counts.made_nodes += 1
        node.number = self.counts.made_nodes

    # ── showing ──────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def num_nodes(self) -> int:
        """Roots not counted."""
        return self.counts.made_nodes - self.counts.removed_nodes

    def shown(self, locked: Iterable[RadixNode], most: int) -> list[RadixNode]:
        """At most `most` nodes, each after the one above it: those on the ways to the `locked` ones, then the rest by
        last use. Looks at about so many nodes, however large the tree is. Do not change them.
        """
        chosen: dict[RadixNode, None] = {}
        for end in locked:
            above = end.parent
            if above is None:  # a root: nothing of it is cached
                continue
            if above.parent is not None and above not in chosen:
                way = []
                while above is not None and above.parent is not None and above not in chosen:
                    way.append(above)
                    above = above.parent
                chosen.update(dict.fromkeys(reversed(way)))
            chosen[end] = None
            if len(chosen) >= most:
                return list(chosen)[:most]
        for node in islice(reversed(self._lru), most - len(chosen)):  # the latest used first: a node before its leaves
            above = node.parent
            if above is not None and (above.parent is None or above in chosen):
                chosen[node] = None
        return list(chosen)

    # ── proof ────────────────────────────────────────────────────────────────────────────────────────────────────

    def pages(self) -> Iterable[int]:
        """Every page of the tree, by walking it."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield from node.pages
            stack.extend(node.children.values())

    def check(self, locked: Iterable[RadixNode]) -> None:
        """Walks everything; `locked` are the nodes at which the running sequences' locks are. See integrity.py."""
        books = (self.total_pages, self.evictable_pages, self.num_nodes)
        check_radix(self._roots, self._lru, self._unit, locked, *books)
