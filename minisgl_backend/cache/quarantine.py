"""Ids that were let go but are still named by a step in flight.

Where it stands in the flow: between a release and the free list, for pages (`cache/allocator.py`) and for slots
(`scheduler/slots.py`). A step that was planned runs whatever happens to its sequences, so what it names may be
handed out only after its result was applied.
"""

from __future__ import annotations

from array import array

from minisgl_backend.messages.ids import StepId


class Quarantine:
    """Holds ids by the last step that names them; steps are applied in order, one by one."""

    __slots__ = ("_applied", "_held")

    def __init__(self) -> None:
        self._applied = StepId(0)
        self._held: dict[StepId, array[int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def is_over(self, tag: StepId) -> bool:
        """Whether step `tag` was applied; 0, the tag of what no step ever named, always was."""
        return tag <= self._applied

    def hold(self, ids: array[int], tag: StepId) -> None:
        """Takes `ids` (copied) until `applied(tag)`. Tags may come in any order."""
        assert tag > self._applied, f"ids tagged with step {tag} need no quarantine: step {self._applied} was applied"
        held = self._held.get(tag)
        if held is None:
            self._held[tag] = ids[:]
        else:
            held.extend(ids)

    def applied(self, step: StepId) -> array[int]:
        """Step `step` was applied: the ids that it was the last to name, now the caller's."""
        assert step == self._applied + 1, f"step {step} applied after step {self._applied}"
        self._applied = step
        return self._held.pop(step, _NOTHING)[:]

    def ids(self) -> list[int]:
        """All ids held, for integrity checks."""
        return [one for held in self._held.values() for one in held]


_NOTHING: array[int] = array("i")
