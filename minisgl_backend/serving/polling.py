"""When to ask which open request whether its client left.

Where it stands in the flow: each sender thread keeps one schedule of its own requests. Triton does not tell of a
cancellation, it must be asked, and each question costs a round trip; so questions are spaced, and requests take turns.
Pure: time is an argument.
"""

from __future__ import annotations

from minisgl_backend.messages.ids import RequestId


class PollSchedule:
    """Round robin. Each request comes up every `period_s`, or later when that would mean more than one question per
    `spacing_s`.
    """

    def __init__(self, period_s: float, spacing_s: float) -> None:
        self._period_s = period_s
        self._spacing_s = spacing_s
        self._turns: dict[RequestId, None] = {}  # in the order of their turns
        self._last = 0.0  # when the last question was asked, or the first request came

    def add(self, id: RequestId, now: float) -> None:
        """A new request takes the last turn."""
        if not self._turns:
            self._last = now
        self._turns[id] = None

    def remove(self, id: RequestId) -> None:
        """Unknown ids are ignored."""
        self._turns.pop(id, None)

    def due_at(self) -> float | None:
        """The time of the next question; None without requests."""
        if not self._turns:
            return None
        return self._last + max(self._spacing_s, self._period_s / len(self._turns))

    def take(self, now: float) -> RequestId | None:
        """The request to ask now, or None when no question is due. Missed questions are not made up for."""
        due = self.due_at()
        if due is None or now < due:
            return None
        id = next(iter(self._turns))
        del self._turns[id]
        self._turns[id] = None
        self._last = now
        return id
