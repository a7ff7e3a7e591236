"""When to ask which open request whether its client left.

Where it stands in the flow: each sender thread keeps one schedule of its own requests. Triton does not tell of a
cancellation, it must be asked, and each question costs a round trip; so requests take turns, and a thread that sleeps
is not woken for one question but for all whose turn comes at about that time. Pure: time is an argument.
"""

from __future__ import annotations

from minisgl_backend.messages.ids import RequestId


class PollSchedule:
    """Round robin. The turn of a request comes `period_s` after it was last asked, or later when that would mean more
    than one question per `spacing_s`; it may wait for `slack_s` until the thread is awake anyway.
    """

    def __init__(self, period_s: float, slack_s: float, spacing_s: float) -> None:
        self._period_s = period_s
        self._slack_s = slack_s
        self._spacing_s = spacing_s
        self._turns: dict[RequestId, tuple[float, float]] = {}  # last asked, turn; who was asked longest ago is first

    def add(self, id: RequestId, now: float) -> None:
        """A new request takes the last turn."""
        self._turns[id] = (now, now)  # counts for the interval
        self._turns[id] = (now, now + self._interval_s())

    def remove(self, id: RequestId) -> None:
        """Unknown ids are ignored."""
        self._turns.pop(id, None)

    def wake_at(self) -> float | None:
        """When the next question must be asked; None without requests."""
        turn = self._next_turn()
        return None if turn is None else turn + self._slack_s

    def take(self, now: float) -> RequestId | None:
        """The request to ask now, or None when nobody's turn has come. Missed questions are not made up for."""
        turn = self._next_turn()
        if turn is None or now < turn:
            return None
        id = next(iter(self._turns))
        del self._turns[id]
        self.add(id, now)
        return id

    def _next_turn(self) -> float | None:
        """A turn given while many were open comes earlier when most have ended: those behind it wait for it."""
        for asked, turn in self._turns.values():
            return min(turn, asked + self._interval_s())
        return None

    def _interval_s(self) -> float:
        return max(self._period_s, self._spacing_s * len(self._turns))
