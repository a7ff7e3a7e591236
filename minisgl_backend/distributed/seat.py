"""Which of an engine's ranks a worker is, and how it meets the others. Loads no torch.

Where it stands in the flow: the executor gives each worker its seat, the worker opens its group from it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

SLOT_BYTES = 1 << 20
"""More goes in pieces. 64 rows of a model with vectors of 8,192 numbers in bf16 go at once."""

_MAILBOX_BYTES = 128  # exchange.h


@dataclass(frozen=True, slots=True)
class Seat:
    """Of one rank. With one rank there is nobody to meet."""

    rank: int = 0
    ranks: int = 1
    memory: int = -1  # descriptor of memory that all ranks of this machine share (distributed/shared.py)
    meeting: Path = Path()  # a file that all ranks can open, where there is no such memory to be used


ALONE = Seat()


def make_memory(ranks: int) -> int:
    """A file descriptor of fresh memory for so many ranks, to be passed on to them alone. The caller closes it."""
    descriptor = os.memfd_create("minisgl-ranks")
    os.ftruncate(descriptor, memory_bytes(ranks))
    return descriptor


def memory_bytes(ranks: int) -> int:
    """See exchange.h."""
    return ranks * (_MAILBOX_BYTES + 2 * SLOT_BYTES)
