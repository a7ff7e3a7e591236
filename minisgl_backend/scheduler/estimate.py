"""How much of what sequences ask for they really take.

Where it stands in the flow: `admission.Reserve` keeps this share of the tokens still to come; the scheduler tells it
of every end and every retraction. Pure and deterministic: the same lives give the same share.

Two things are learned. `share` is what outputs were of what was asked, a mean that forgets. `margin` says how much of
that must be kept: outputs end one after the other, and each leaves room for the rest, so less than the sum of what is
expected suffices; how much less shows in the retractions.
"""

from __future__ import annotations

_FORGET = 1 / 32  # weight of the newest end
_MARGIN = (0.25, 2.0)
_EASE = 1 / 64  # by which share the margin shrinks with each end
_ALARM = 0.1  # how much it grows with a retraction


class OutputEstimate:
    """Mutable, owned by the reserve."""

    __slots__ = ("margin", "ratio", "share")

    def __init__(self) -> None:
        self.share = 0.5  # nothing is known yet
        self.margin = 1.0
        self.ratio = 0.5  # of the tokens still to come, those to keep pages for

    def ended(self, tokens: int, asked: int) -> None:
        """A sequence ended by itself after `tokens` of at most `asked`."""
        self.share += (tokens / asked - self.share) * _FORGET
        self._set_margin(self.margin * (1.0 - _EASE))

    def retracted(self) -> None:
        """There was too little: a sequence had to give way."""
        self._set_margin(self.margin + _ALARM)

    def _set_margin(self, margin: float) -> None:
        low, high = _MARGIN
        self.margin = min(high, max(low, margin))
        self.ratio = min(1.0, self.share * self.margin)
