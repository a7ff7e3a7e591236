"""A request that the text actor has not answered for good."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from minisgl_backend.actors.internal import HolderId
from minisgl_backend.messages.ids import RequestId, SequenceId
from minisgl_backend.text.record import Record


@dataclass(slots=True)
class OpenRequest:
    """Owned by the text actor. `record` is None while its prompt is being tokenised.

    Its n answers are the sequences with the ids `sequence` … `sequence` + n - 1.
    """

    holder: HolderId
    request: RequestId
    sequence: SequenceId
    arrived_s: float  # monotonic
    num_samples: int = 1
    record: Record | None = None
    tokenising: asyncio.Task[None] | None = None  # beside the loop

    @property
    def sequences(self) -> list[SequenceId]:
        """Of its answers, in their order."""
        return [SequenceId(self.sequence + index) for index in range(self.num_samples)]
