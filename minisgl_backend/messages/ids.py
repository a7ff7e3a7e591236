"""The ids that must not mix. Plain ints at run time; mypy keeps them apart."""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", int)
"""Given by the holder of a lease (a bridge, an `LLM`); unique within that lease."""

SequenceId = NewType("SequenceId", int)
"""Given by the text actor; unique within the life of one engine host."""

SlotId = NewType("SlotId", int)
"""A row of the worker's per-sequence state, 0 … max_running - 1; handed out by the scheduler."""

PageId = NewType("PageId", int)
"""A page of the KV pool, 0 … num_pages - 1; handed out by the allocator."""

StepId = NewType("StepId", int)
"""Numbers the plans of one engine group from 1 up, without gaps."""
