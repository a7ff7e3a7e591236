"""How fast the engine is at present, as its clients see it: tokens a second, times to the first token, between tokens.

Where it stands in the flow: the text actor tells it of every token; the view of the engine reads it. Pure: the time is
an argument. A token costs a tenth of a microsecond or two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from minisgl_backend.messages.ids import SequenceId

WINDOW_S = 2.0
KEPT_TTFTS = 512
KEPT_GAPS = 2048
_BUCKET_S = 0.1

Percentiles = dict[str, float | None]
"""p50, p90, p99 in milliseconds; None: nothing was measured yet."""


class Rates:
    """Of one engine. Mutable, owned by the text actor."""

    def __init__(self) -> None:
        self._last_s: dict[SequenceId, float] = {}  # the last token of those that go on
        self._gaps_s: deque[float] = deque(maxlen=KEPT_GAPS)
        self._ttfts_s: deque[float] = deque(maxlen=KEPT_TTFTS)
        self._buckets: deque[tuple[float, int]] = deque()  # when it began, tokens

    def first_token(self, after_s: float) -> None:
        """Of a sequence, so long after its request came."""
        self._ttfts_s.append(after_s)

    def tokens(self, ids: Sequence[SequenceId], now_s: float) -> None:
        """Each of these got one."""
        if not ids:
            return
        last_s, gaps_s = self._last_s, self._gaps_s
        for id in ids:
            before_s = last_s.get(id)
            if before_s is not None:
                gaps_s.append(now_s - before_s)
            last_s[id] = now_s
        self._count(len(ids), now_s)

    def ended(self, ids: Iterable[SequenceId]) -> None:
        """No token will follow."""
        for id in ids:
            self._last_s.pop(id, None)

    def all_ended(self) -> None:
        self._last_s.clear()

    def tokens_per_s(self, now_s: float) -> float:
        """Mean of the last `WINDOW_S`."""
        self._forget(now_s)
        return sum(tokens for _, tokens in self._buckets) / WINDOW_S

    def ttft_ms(self) -> Percentiles:
        """Of the last `KEPT_TTFTS` answers that began."""
        return _percentiles(self._ttfts_s)

    def itl_ms(self) -> Percentiles:
        """Of the last `KEPT_GAPS` tokens that were not their answer's first."""
        return _percentiles(self._gaps_s)

    def _count(self, tokens: int, now_s: float) -> None:
        if self._buckets and now_s < self._buckets[-1][0] + _BUCKET_S:
            began_s, before = self._buckets.pop()
            self._buckets.append((began_s, before + tokens))
        else:
            self._forget(now_s)
            self._buckets.append((now_s, tokens))

    def _forget(self, now_s: float) -> None:
        while self._buckets and self._buckets[0][0] <= now_s - WINDOW_S:
            self._buckets.popleft()


def _percentiles(seconds: Iterable[float]) -> Percentiles:
    """The smallest value that so many of all do not pass."""
    ordered = sorted(seconds)
    if not ordered:
        return {"p50": None, "p90": None, "p99": None}
    return {f"p{p}": round(ordered[-(-len(ordered) * p // 100) - 1] * 1e3, 3) for p in (50, 90, 99)}
