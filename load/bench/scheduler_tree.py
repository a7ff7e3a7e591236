"""What the radix tree costs when it never helps: requests that share nothing, in a full pool.

Where it stands in the flow: one part of `load/bench/scheduler.py`. The tree alone is called, in the way in which
`scheduler/sharing.py` calls it: peek and match at the admission, the prompt's pages by chunks, a page of the answer at
a time, unlock at the end, and an eviction for the pages of the next request.
"""

from __future__ import annotations

import random
import time
from array import array
from collections import deque
from dataclasses import asdict, dataclass, replace

from minisgl_backend.cache.radix import RadixCache, RadixCounts
from minisgl_backend.messages.ids import StepId
from minisgl_backend.messages.tokens import pack_tokens

MOST_US_PER_REQUEST, MOST_US_PER_PAGE = 10.0, 1.0
"""What the tree may cost at no hits."""

_CHUNK_PAGES = 32
_VOCABULARY = 30_000


@dataclass(frozen=True)
class Request:
    """Pages of one request: those of its prompt, known from the start, and those of its answer."""

    key: bytes
    prompt_pages: int
    answer_pages: int


@dataclass(frozen=True)
class TreeWork:
    """CPU time of all calls, and what they did."""

    requests: int
    pages: int
    us: float
    counts: RadixCounts

    @property
    def share_of_allowance(self) -> float:
        """1.0 is all of what the tree may cost."""
        return self.us / (MOST_US_PER_REQUEST * self.requests + MOST_US_PER_PAGE * self.pages)


def make_requests(number: int, page_size: int, prompt_pages: int, answer_pages: int, seed: int = 0) -> list[Request]:
    """Random tokens: no two requests share a page."""
    chance = random.Random(seed)
    tokens = (prompt_pages + answer_pages) * page_size
    return [
        Request(
            pack_tokens([index % _VOCABULARY, *chance.choices(range(_VOCABULARY), k=tokens - 1)]),
            prompt_pages,
            answer_pages,
        )
        for index in range(number)
    ]


def measure(requests: list[Request], page_size: int, cached_pages: int, running: int) -> TreeWork:
    """Serves the requests in order, `running` at a time; the tree keeps `cached_pages`. The first half warms up."""
    tree = RadixCache(page_size)
    open_ones = deque[_Open]()
    begin, before = 0, RadixCounts()
    for number, request in enumerate(requests):
        if number == len(requests) // 2:
            begin, before = time.thread_time_ns(), replace(tree.counts)
        one = _Open(tree, request, number + 1)
        one.prompt()
        open_ones.append(one)
        if len(open_ones) == running:
            open_ones.popleft().answer_and_go()
        surplus = tree.total_pages - cached_pages
        if surplus > 0:
            tree.evict(surplus, StepId(number + 1))
    us = (time.thread_time_ns() - begin) / 1000
    earlier = asdict(before)
    counts = RadixCounts(**{name: now - earlier[name] for name, now in asdict(tree.counts).items()})
    assert counts.matched_pages == 0, "requests that should share nothing were found in the tree"
    return TreeWork(len(requests) - len(requests) // 2, counts.inserted_pages, us, counts)


class _Open:
    """A request under way, as the scheduler would walk it through the tree."""

    def __init__(self, tree: RadixCache, request: Request, number: int) -> None:
        self.tree = tree
        self.request = request
        self.step = StepId(number)
        self.unit = tree.page_size * array("i").itemsize
        self.done = 0

    def prompt(self) -> None:
        request = self.request
        self.tree.peek(b"", request.key, request.prompt_pages)
        self.node, _ = self.tree.match(b"", request.key, request.prompt_pages)
        while self.done < request.prompt_pages:
            self._insert(min(_CHUNK_PAGES, request.prompt_pages - self.done))

    def answer_and_go(self) -> None:
        for _ in range(self.request.answer_pages):
            self._insert(1)
        self.tree.unlock(self.node, self.step)

    def _insert(self, count: int) -> None:
        key = self.request.key[self.done * self.unit : (self.done + count) * self.unit]
        node = self.tree.insert(self.node, key, array("i", range(self.done, self.done + count)), self.step)
        assert node is not None, "a page that nobody else has was there already"
        self.node = node
        self.done += count
