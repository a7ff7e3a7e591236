"""A group of ranks on one machine over memory that all of them have mapped: kernels/native/src/exchange.h.

No socket, no lock and no call of the kernel where everybody is in time: a sum over the rows of a decode step costs what
reading them costs. The memory has no name in any file system (memfd): the host makes it, its workers inherit it, and it
goes with the last of them. Its calls can be recorded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl_backend.distributed.seat import memory_bytes
from minisgl_backend.kernels.native.library import Library

PATIENCE_S = 600.0
"""With a rank that does not come. It ends long before: the host ends a group of which one rank is lost, and one whose
step takes too long (setting `step_limit_s`).
"""


class SharedGroup:
    """See RankGroup."""

    def __init__(
        self, library: Library, rank: int, ranks: int, descriptor: int, patience_s: float = PATIENCE_S
    ) -> None:
        """descriptor: of seat.make_memory; it may be closed afterwards. Waits for nobody."""
        self.rank = rank
        self.ranks = ranks
        self._ops = library.ops
        path = f"/proc/self/fd/{descriptor}"
        self._memory = torch.from_file(path, shared=True, size=memory_bytes(ranks), dtype=torch.uint8)
        self._where = (self._memory, rank, ranks, patience_s)

    def add_up(self, x: Tensor) -> Tensor:
        """See RankGroup. Summed in fp32."""
        self._ops.add_up.default(x, *self._where)
        return x

    def join_columns(self, x: Tensor, columns: int) -> Tensor:
        """See RankGroup."""
        out: Tensor = self._ops.join_columns.default(x.contiguous(), columns, *self._where)
        return out

    def from_first(self, x: Tensor) -> Tensor:
        """See RankGroup."""
        self._ops.from_first.default(x, *self._where)
        return x

    def close(self) -> None:
        """See RankGroup: the memory goes with its last mapping."""
