"""Slots: the rows of the workers' per-sequence state.

Where it stands in the flow: `lives.py` gives one to a sequence at admission; `release.py` gives it back.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from minisgl_backend.cache.quarantine import Quarantine
from minisgl_backend.messages.ids import SlotId, StepId


class SlotPool:
    """Hands out slots 0 … num_slots - 1, the one freed last first, none while a step in flight names it."""

    __slots__ = ("_free", "_quarantine", "num_slots")

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = array("i", range(num_slots - 1, -1, -1))
        self._quarantine = Quarantine()

    @property
    def free_slots(self) -> int:
        """Slots that can be taken now; those in quarantine not counted."""
        return len(self._free)

    @property
    def quarantined_slots(self) -> int:
        """Slots that come free as soon as steps in flight are applied."""
        return len(self._quarantine)

    def take(self) -> SlotId:
        return SlotId(self._free.pop())

    def release(self, slot: SlotId, tag: StepId) -> None:
        """`tag` is the last step that names the slot."""
        if self._quarantine.is_over(tag):
            self._free.append(slot)
        else:
            self._quarantine.hold(array("i", (slot,)), tag)

    def applied(self, step: StepId) -> None:
        """Frees what waited for `step`. Called for every step, in order."""
        self._free.extend(self._quarantine.applied(step))

    def check(self, held: Iterable[int]) -> None:
        """Proves that free list, quarantine and the running sequences (`held`) have every slot exactly once."""
        every = sorted([*self._free, *self._quarantine.ids(), *held])
        assert every == list(range(self.num_slots)), f"slots are lost or held twice: {every}"
