"""Who owns each KV page, and the free list.

Where it stands in the flow: `scheduler/` takes pages here while it plans, shares them through the tree, and gives them
back when a sequence is let go or the tree evicts. Page ids index the tensors of `kvpool/`; nothing here touches memory.

    take ┌───────────┐     release, its last step applied   ┌──────────┐  share   ┌──────┐
    ┌────┤   FREE    │◄─────────────────────────────────────┤ SEQUENCE ├─────────►│ TREE │
    │    └───────────┘                                      └─┬────────┘          └──┬───┘
    │          ▲ applied(step)                                │    ▲                 │ evicted
    │    ┌─────┴──────┐  release, a step in flight names it   │    │                 │
    │    │ QUARANTINE │◄──────────────────────────────────────┘    │                 │
    │    └────────────┘◄───────────────────────────────────────────┼─────────────────┘ (or free at once)
    └──────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from minisgl_backend.cache.quarantine import Quarantine
from minisgl_backend.messages.ids import StepId

FREE = 0
SEQUENCE = 1
QUARANTINE = 2
TREE = 3
_NAMES = ("the free list", "a sequence", "the quarantine", "the tree")


class PageAllocator:
    """Hands out pages 0 … num_pages - 1, the one freed last first. Each page has exactly one owner at any time."""

    __slots__ = ("_free", "_owner", "_quarantine", "num_pages", "quarantined_pages")

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = array("i", range(num_pages - 1, -1, -1))  # a stack: the end is handed out first
        self._owner = bytearray(num_pages)  # FREE, SEQUENCE, QUARANTINE or TREE of each page
        self._quarantine = Quarantine()
        self.quarantined_pages = 0  # those that come free as soon as steps in flight are applied

    @property
    def free_pages(self) -> int:
        """Pages that can be taken now; those in quarantine not counted."""
        return len(self._free)

    def take(self, count: int) -> array[int]:
        """`count` ≥ 1 pages, now the caller's. Asking for more than are free is a bug of the caller."""
        assert 1 <= count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        self._move(taken, FREE, SEQUENCE)
        return taken

    def take_one(self) -> int:
        """`take(1)` without an array: a decoding sequence's next page."""
        assert self._free, "a page wanted, none free"
        page = self._free.pop()
        assert self._owner[page] == FREE, f"page {page} was free, but belongs to {_NAMES[self._owner[page]]}"
        self._owner[page] = SEQUENCE
        return page

    def share(self, pages: array[int]) -> None:
        """A sequence's pages become the tree's: others may read them from now on."""
        self._move(pages, SEQUENCE, TREE)

    def release(self, pages: array[int], tag: StepId, owner: int = SEQUENCE) -> None:
        """`owner` gives `pages` (read, not kept) back; `tag` is the last step that names them."""
        if self._quarantine.is_over(tag):
            self._move(pages, owner, FREE)
            self._free.extend(pages[::-1])
        elif pages:
            self._move(pages, owner, QUARANTINE)
            self._quarantine.hold(pages, tag)
            self.quarantined_pages += len(pages)

    def applied(self, step: StepId) -> None:
        """Frees what waited for `step`. Called for every step, in order."""
        pages = self._quarantine.applied(step)
        self.quarantined_pages -= len(pages)
        self._move(pages, QUARANTINE, FREE)
        self._free.extend(pages[::-1])

    def check(self, private: Iterable[Iterable[int]], tree: Iterable[int] = ()) -> None:
        """Proves that free list, quarantine, the sequences' `private` pages and the `tree` hold every page once."""
        seen = bytearray(self.num_pages)
        for owner, pages in (
            (FREE, self._free),
            (QUARANTINE, self._quarantine.ids()),
            (SEQUENCE, [page for table in private for page in table]),
            (TREE, tree),
        ):
            for page in pages:
                assert not seen[page], f"page {page} is held twice, at last by {_NAMES[owner]}"
                seen[page] = 1
                assert self._owner[page] == owner, (
                    f"page {page} is held by {_NAMES[owner]} but accounted to {_NAMES[self._owner[page]]}"
                )
        assert 0 not in seen, f"page {seen.index(0)} is lost: accounted to {_NAMES[self._owner[seen.index(0)]]}"
        held = len(self._quarantine)
        assert self.quarantined_pages == held, f"{self.quarantined_pages} pages counted in quarantine, {held} are"

    def _move(self, pages: array[int], source: int, target: int) -> None:
        owner = self._owner
        for page in pages:
            assert owner[page] == source, (
                f"page {page} should move from {_NAMES[source]} to {_NAMES[target]}, "
                f"but belongs to {_NAMES[owner[page]]}"
            )
            owner[page] = target
