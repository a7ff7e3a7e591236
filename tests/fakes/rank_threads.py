"""The ranks of a model as threads of a test: their group, and how to run all of them.

The sums are taken in the order of the ranks. Every call is counted, by kind.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from minisgl_backend.distributed.group import RankGroup

T = TypeVar("T")

_PATIENCE_S = 60.0


class _Table:
    """Where ranks put what the others need."""

    def __init__(self, ranks: int) -> None:
        self.places: list[Tensor] = [torch.empty(0)] * ranks
        self.barrier = threading.Barrier(ranks, timeout=_PATIENCE_S)


class ThreadGroup:
    """See RankGroup."""

    def __init__(self, rank: int, ranks: int, table: _Table) -> None:
        self.rank = rank
        self.ranks = ranks
        self.calls: Counter[str] = Counter()
        self._table = table

    def add_up(self, x: Tensor) -> Tensor:
        self.calls["add_up"] += 1
        total = torch.stack(self._exchange(x)).sum(0, dtype=torch.float32).to(x.dtype)
        return x.copy_(total)

    def join_columns(self, x: Tensor, columns: int) -> Tensor:
        self.calls["join_columns"] += 1
        return torch.cat(self._exchange(x), -1)[:, :columns].contiguous()

    def from_first(self, x: Tensor) -> Tensor:
        self.calls["from_first"] += 1
        return x.copy_(self._exchange(x)[0])

    def close(self) -> None:
        self._table.barrier.abort()

    def _exchange(self, x: Tensor) -> list[Tensor]:
        assert x.is_contiguous() or x.dim() < 2
        self._table.places[self.rank] = x
        self._table.barrier.wait()
        copies = [place.clone() for place in self._table.places]
        self._table.barrier.wait()
        return copies


def on_ranks(ranks: int, work: Callable[[RankGroup], T]) -> list[T]:
    """Runs `work` on all ranks at once → what it gave on each. One rank that fails ends all."""
    table = _Table(ranks)
    groups = [ThreadGroup(rank, ranks, table) for rank in range(ranks)]

    def run(group: ThreadGroup) -> T:
        try:
            return work(group)
        except BaseException:
            group.close()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(run, group) for group in groups]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
