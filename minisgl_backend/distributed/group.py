"""The ranks that compute one model together, and what they say to one another within a step.

Where it stands in the flow: a worker of several makes its group at the start and hands it down to the layers that need
it (layers/parallel.py) and to the runner; nothing here is global. All ranks call the same functions in the same order,
since all run the same plans; a rank that is gone ends the engine group (actors/executors), so nobody waits for it long.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class RankGroup(Protocol):
    """Of one rank. Every call waits for the other ranks. Raises RuntimeError when one of them does not come in time."""

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    def add_up(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in x itself, which is contiguous → x. The same numbers on every rank."""
        ...

    def join_columns(self, x: Tensor, columns: int) -> Tensor:
        """x [rows, n] → [rows, columns], a new tensor: of the ranks' own, side by side in their order, the first ones.
        columns: at most ranks · n.
        """
        ...

    def from_first(self, x: Tensor) -> Tensor:
        """Rank 0's x on all, in x itself, which is contiguous → x."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...
