"""What an order reads of a sequence that waits.

Where it stands in the flow: `SequenceState` has these; `order.py` and `order_prefix.py` read nothing else of it.
"""

from __future__ import annotations

from typing import Protocol

from minisgl_backend.messages.ids import SequenceId


class Waiting(Protocol):
    """None of it changes while the sequence waits. Orders compare sequences by `id`."""

    @property
    def id(self) -> SequenceId: ...

    @property
    def arrival(self) -> int:
        """1, 2, 3 … in the order of add(); kept over a retraction."""

    @property
    def priority(self) -> int:
        """Smaller goes earlier, under `priority`."""

    @property
    def namespace(self) -> bytes:
        """Of the prefix cache."""

    @property
    def tokens(self) -> bytes:
        """All known tokens, packed int32: the prompt, and what was generated before a retraction."""

    @property
    def limit_pages(self) -> int:
        """How many pages of the cache it may use at most."""
