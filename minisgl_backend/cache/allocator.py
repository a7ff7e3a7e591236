"""Who owns each KV page, and the free list.

Where it stands in the flow: `scheduler/` takes pages here while it plans and gives them back when a sequence is let
go. Page ids index the tensors of `kvpool/`; nothing here touches memory.

    take ┌───────────┐  release, its last step applied   ┌──────┐
    ┌────┤   FREE    │◄──────────────────────────────────┤      │
    │    └───────────┘                                   │ SEQ- │
    │          ▲ applied(step)                           │ UENCE│
    │    ┌─────┴──────┐  release, still named by a step  │      │
    │    │ QUARANTINE │◄─────────────────────────────────┤      │
    │    └────────────┘                                  └──────┘
    └───────────────────────────────────────────────────────▲
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from minisgl_backend.cache.quarantine import Quarantine
from minisgl_backend.messages.ids import StepId

FREE = 0
SEQUENCE = 1
QUARANTINE = 2
_NAMES = ("the free list", "a sequence", "the quarantine")


class PageAllocator:
    """Hands out pages 0 … num_pages - 1, the one freed last first. Each page has exactly one owner at any time."""

    __slots__ = ("_free", "_owner", "_quarantine", "num_pages")

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = array("i", range(num_pages - 1, -1, -1))  # a stack: the end is handed out first
        self._owner = bytearray(num_pages)  # FREE, SEQUENCE or QUARANTINE of each page
        self._quarantine = Quarantine()

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

    def release(self, pages: array[int], tag: StepId) -> None:
        """A sequence gives `pages` (read, not kept) back; `tag` is the last step that names it."""
        if self._quarantine.is_over(tag):
            self._move(pages, SEQUENCE, FREE)
            self._free.extend(pages[::-1])
        else:
            self._move(pages, SEQUENCE, QUARANTINE)
            self._quarantine.hold(pages, tag)

    def applied(self, step: StepId) -> None:
        """Frees what waited for `step`. Called for every step, in order."""
        pages = self._quarantine.applied(step)
        self._move(pages, QUARANTINE, FREE)
        self._free.extend(pages[::-1])

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """Proves that free list, quarantine and the sequences' `tables` hold every page exactly once."""
        seen = bytearray(self.num_pages)
        for owner, pages in (
            (FREE, self._free),
            (QUARANTINE, self._quarantine.ids()),
            (SEQUENCE, [page for table in tables for page in table]),
        ):
            for page in pages:
                assert not seen[page], f"page {page} is held twice, at last by {_NAMES[owner]}"
                seen[page] = 1
                assert self._owner[page] == owner, (
                    f"page {page} is held by {_NAMES[owner]} but accounted to {_NAMES[self._owner[page]]}"
                )
        assert 0 not in seen, f"page {seen.index(0)} is lost: accounted to {_NAMES[self._owner[seen.index(0)]]}"

    def _move(self, pages: array[int], source: int, target: int) -> None:
        owner = self._owner
        for page in pages:
            assert owner[page] == source, (
                f"page {page} should move from {_NAMES[source]} to {_NAMES[target]}, "
                f"but belongs to {_NAMES[owner[page]]}"
            )
            owner[page] = target
