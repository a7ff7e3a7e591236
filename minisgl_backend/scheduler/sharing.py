"""What of a sequence's pages others may read, from its admission to its release.

Where it stands in the flow: between the scheduler and the tree with its pages (`cache/`). `planner.py` begins, follows
and enters prompts, `Scheduler.apply` enters confirmed tokens, `release.py` leaves. The rules are those of
docs/scheduler.md:

- A sequence owns the pages behind its first `tree_pages`; those are the tree's, which it locks up to `node`.
- Full pages of a prompt enter when they are planned: steps run in order, and in a step each layer writes the K/V of
  all rows before any row attends. Pages of generated tokens enter when the tokens are confirmed.
- Who finds its next page in the tree already keeps its own and enters no more: tables only grow (rules 5 and 6).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping

from minisgl_backend.cache.allocator import TREE, PageAllocator
from minisgl_backend.cache.node import RadixNode
from minisgl_backend.cache.radix import Evicted, Peek, RadixCache
from minisgl_backend.messages.ids import StepId
from minisgl_backend.scheduler.sequence import NEVER, SequenceState

_NOTHING = Peek(0, 0)


class Sharing:
    """Moves pages between sequences, tree and allocator. With `enabled` false the tree stays empty."""

    __slots__ = ("_enabled", "_page_size", "_pages", "tree")

    def __init__(self, pages: PageAllocator, tree: RadixCache, enabled: bool) -> None:
        self.tree = tree
        self._pages = pages
        self._page_size = tree.page_size
        self._enabled = enabled

    def peek(self, state: SequenceState) -> Peek:
        """What `begin` would find. Changes nothing."""
        if not self._enabled:
            return _NOTHING
        return self.tree.peek(state.namespace, state.tokens, state.limit_pages)

    def peek_without(self, leaving: Mapping[RadixNode, int], state: SequenceState) -> Peek:
        """`peek`, as it were without the locks `leaving`."""
        if not self._enabled:
            return _NOTHING
        return self.tree.peek(state.namespace, state.tokens, state.limit_pages, leaving)

    def begin(self, state: SequenceState) -> None:
        """Locks the longest prefix that is here, and puts its pages into the empty table."""
        if self._enabled:
            state.node, found = self.tree.match(state.namespace, state.tokens, state.limit_pages)
            self._skip(state, found)

    def cancel(self, state: SequenceState) -> None:
        """Undoes `begin`: there is no room after all. No step names the pages for this sequence."""
        if state.node is not None:
            self.tree.unlock(state.node, StepId(0))
        state.let_go()

    def follow(self, state: SequenceState) -> int:
        """An extending sequence goes on over pages that came into the tree since its last chunk: somebody has left who
        was ahead of it, with tokens of its own that are the same. Returns how many.

        Only at a page's end: a page of which it wrote a part is its own for ever.
        """
        node = state.node
        if node is None or not node.children or state.tree_pages * self._page_size != state.computed:
            return 0
        state.node, found = self.tree.follow(node, state.tokens, state.tree_pages, state.limit_pages)
        self._skip(state, found)
        return len(found)

    def _skip(self, state: SequenceState, found: array[int]) -> None:
        if found:
            state.append_pages(found, self._page_size)
            state.tree_pages += len(found)
            state.computed = state.tree_pages * self._page_size

    def enter_prompt(self, state: SequenceState) -> bool:
        """The full pages of what is planned of an extending sequence. Returns whether any entered."""
        first, end = state.tree_pages, state.computed // self._page_size
        if state.node is None or first == end:
            return False
        return self._enter(state, end)

    def expect_page(self, state: SequenceState) -> None:
        """From now on it decodes: says when the next page enters. Never, if it met one of its pages in the tree."""
        if state.node is not None and state.tree_pages == state.known // self._page_size:
            state.enter_later(self._page_size)

    def enter_confirmed(self, state: SequenceState) -> None:
        """The pages that the tokens of a decoding sequence have filled; `known` is at `enter_at`."""
        if self._enter(state, (state.known - 1) // self._page_size):
            state.enter_later(self._page_size)
        else:
            state.enter_at = NEVER

    def _enter(self, state: SequenceState, end: int) -> bool:
        first, node = state.tree_pages, state.node
        assert node is not None
        pages = state.pages[first:end]
        grown = self.tree.insert(node, state.key(first, end, self._page_size), pages, state.last_step)
        if grown is None:
            return False
        self._pages.share(pages)
        state.node = grown
        state.tree_pages = end
        return True

    def leave(self, state: SequenceState, tokens: int) -> None:
        """A sequence lets its pages go, of which the K/V of the first `tokens` tokens may be used by others.

        It walks on from its lock: what others have entered meanwhile are duplicates and come free, what is missing
        enters.
        """
        pages, step, node = state.pages, state.last_step, state.node
        end = tokens // self._page_size
        first = state.tree_pages
        if node is None:
            self._pages.release(pages, step)
            return
        if end > first:
            key = state.key(first, end, self._page_size)
            node, found = self.tree.follow(node, key, 0, end - first)
            new = first + len(found)
            if new < end:
                grown = self.tree.insert(node, key[len(found) * len(key) // (end - first) :], pages[new:end], step)
                assert grown is not None, "a page that was not found is there"
                node = grown
                self._pages.share(pages[new:end])
            self._pages.release(pages[first:new], step)
        self._pages.release(pages[max(first, end) :], step)
        self.tree.unlock(node, step)

    def forget(self, state: SequenceState) -> None:
        """`leave` for a sequence whose numbers are not finite. They may come from any of the pages it has read,
        and would come to whoever else reads that one: from now on nobody finds them.
        """
        self._pages.release(state.pages[state.tree_pages :], state.last_step)
        if state.node is not None:
            self.tree.unlock(state.node, state.last_step)
            self.tree.hide(state.node)
            self._take_back(self.tree.forget(state.node))

    def frees_pages(self, state: SequenceState, together: int = 1) -> bool:
        """Whether anybody gains a page by its release, or by that of the `together` whose locks end where its does."""
        if len(state.pages) > state.tree_pages:
            return True
        return state.node is not None and state.node.locks == together and bool(state.node.pages)

    def locks(self, states: Iterable[SequenceState]) -> Counter[RadixNode]:
        """How many of `states` lock each node."""
        locks: Counter[RadixNode] = Counter()
        for state in states:
            node = state.node
            while node is not None:
                locks[node] += 1
                node = node.parent
        return locks

    def gives_up(self, states: Iterable[SequenceState], locks: Mapping[RadixNode, int]) -> int:
        """How many pages can be had when all `states`, whose locks are `locks`, are released."""
        own = sum(len(state.pages) - state.tree_pages for state in states)
        return own + sum(len(node.pages) for node, held in locks.items() if node.locks == held)

    def evict(self, count: int, applied: StepId) -> int:
        """Up to `count` pages of the tree become free, or will be when a step in flight is applied. Returns how many.

        Nothing is evicted twice, and never what a running sequence has locked.
        """
        evicted = self.tree.evict(count, applied)
        self._take_back(evicted)
        return sum(len(one.pages) for one in evicted)

    def reset(self) -> None:
        """Nothing in the tree is to be trusted any more. Nobody may hold a lock."""
        self._take_back(self.tree.reset())

    def _take_back(self, evicted: Iterable[Evicted]) -> None:
        for one in evicted:
            self._pages.release(one.pages, one.step, TREE)
