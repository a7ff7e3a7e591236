"""What a device can record: work that is launched once, and then again and again by one call over the same memory.

The contract is that of CUDA graphs; a CPU keeps it with a list of native calls (kernels/native/recording.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class NotRecordable(Exception):
    """In the middle of the work stands something that a replay would leave out. The message names it."""


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Runs it again, over the same memory, behind what was launched before."""
        ...

    def close(self) -> None:
        """Lets go of what it holds. Idempotent."""
        ...


class Recorder(Protocol):
    """How a device records."""

    @property
    def shares_memory(self) -> bool:
        """Whether recordings work in the memory of the largest, which is then to be made first. What one returns is
        its own all the same.
        """
        ...

    @property
    def held_bytes(self) -> int:
        """What all recordings made so far took, those that are closed among them."""
        ...

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        """Runs `work` and records it → the recording, and what work returned, which each replay fills anew.

        `work` may be run more than once. Raises NotRecordable, in the middle of the work, whose effects so far stay.
        """
        ...
