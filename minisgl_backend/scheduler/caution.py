"""How carefully to go on after a step that failed.

Where it stands in the flow: `Scheduler.fail` raises the level, applied steps lower it again, and `plan` keeps to the
budget and the number of running sequences that go with it. Each level halves both. So if every step fails in which a
certain sequence has a row, it stands alone in a step after a few failures, and fails alone.
"""

from __future__ import annotations

from minisgl_backend.scheduler.limits import Limits

_CALM_STEPS = 64
"""Steps without a failure until the level sinks by one."""


class Caution:
    """Mutable, owned by the scheduler."""

    __slots__ = ("_calm", "_limits", "level", "max_running", "token_budget")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._calm = 0  # steps applied since the last change
        self.level = 0
        self.max_running = limits.max_running
        self.token_budget = limits.token_budget

    def failed(self) -> None:
        if self.max_running > 1 or self.token_budget > 1 + self._limits.page_size:
            self._set(self.level + 1)
        self._calm = 0

    def applied(self) -> None:
        if self.level:
            self._calm += 1
            if self._calm == _CALM_STEPS:
                self._set(self.level - 1)

    def _set(self, level: int) -> None:
        """The budget always holds a row for each that runs, and a page of prompt."""
        limits = self._limits
        self.level, self._calm = level, 0
        self.max_running = max(1, limits.max_running >> level)
        self.token_budget = max(self.max_running + limits.page_size, limits.token_budget >> level)
