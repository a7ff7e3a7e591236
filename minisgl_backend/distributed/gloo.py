"""A group over gloo: torch's collectives for CPUs, over TCP on the loopback device or between machines.

The process group is an object of ours, not torch's default one: two engines in a process do not meet. Ranks find one
another through a file in the engine group's folder.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_TIMEOUT_S = 600.0


class GlooGroup:
    """See RankGroup."""

    def __init__(self, rank: int, ranks: int, meeting: Path, timeout_s: float = _TIMEOUT_S) -> None:
        """meeting: a file that all ranks name, and that is there for nobody else. Waits for all ranks."""
        self.rank = rank
        self.ranks = ranks
        torch_dist: Any = dist  # half of what it has is in no stub
        gloo = torch_dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=timeout_s)
        self._gloo: Any = gloo(torch_dist.FileStore(str(meeting), ranks), rank, ranks, options)

    def add_up(self, x: Tensor) -> Tensor:
        """See RankGroup. Gloo adds half precision in half precision: what is narrower is widened before."""
        if x.dtype in (torch.bfloat16, torch.float16):
            wide = x.float()
            self._gloo.allreduce([wide]).wait()
            return x.copy_(wide)
        self._gloo.allreduce([x]).wait()
        return x

    def join_columns(self, x: Tensor, columns: int) -> Tensor:
        """See RankGroup."""
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.ranks)]
        self._gloo.allgather([parts], [x.contiguous()]).wait()
        return torch.cat(parts, dim=-1)[:, :columns].contiguous()

    def from_first(self, x: Tensor) -> Tensor:
        """See RankGroup."""
        self._gloo.broadcast(x, 0).wait()
        return x

    def close(self) -> None:
        """See RankGroup: the object's end closes its connections."""
