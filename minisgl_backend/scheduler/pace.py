"""How many prompt tokens the next step may compute, so that running streams do not wait longer than promised.

Where it stands in the flow: `Scheduler.plan` asks `prompt_tokens` after it has planned the decode rows; every applied
step is told to `observe`. Without a target the whole budget is the answer and nothing is measured.

A step is taken to cost

    seconds = base + per_row · decode rows + per_token · prompt tokens

whose three numbers follow the machine by recursive least squares with forgetting: each step corrects them as far as
they are uncertain. What a straight line can not say (long contexts, a busy machine) is in `stretch`, the factor that
all but `_LATE_SHARE` of the steps stay under; the next step is sized so that its prediction times `stretch` meets
the target.
"""

from __future__ import annotations

_SPREAD = (1.0, 0.25, 0.25)
"""How far base, per_row and per_token may be off before anything is known, as a share of the first step's seconds
(per_row and per_token: of the seconds for each of its rows and tokens)."""
_FORGET = 0.01  # uncertainty that comes back with each step, as a share of what there was at first
_NOISE = 0.1  # how far steps of the same size differ, as a share of their seconds
_OUTLIER = 3.0  # a step further off than this many times the noise corrects no more than that
_LATE_SHARE = 0.03  # of the steps may pass their stretched prediction
_STRETCH_STEP = 0.05  # how fast `stretch` follows
_STRETCH_RANGE = (1.0, 4.0)
_GROWTH = 2  # prompt tokens per step beyond this many times the most ever seen are not trusted to the line


class Pace:
    """Mutable, owned by the scheduler; pure: seconds are arguments.

    target_itl_s: what a step should take at most while streams run; None: as long as it takes.
    """

    __slots__ = ("_cost", "_covariance", "_ease", "_least", "_most_seen", "_stretch", "_target_s")

    def __init__(self, target_itl_s: float | None, page_size: int) -> None:
        assert target_itl_s is None or target_itl_s > 0.0, f"a target of {target_itl_s} s"
        self._target_s = target_itl_s
        self._least = page_size
        self._cost: list[float] = []  # base, per_row, per_token in seconds; empty until the first step was seen
        self._covariance: list[list[float]] = []  # of `_cost`
        self._ease: list[float] = []  # the variances of `_cost` at first, which later ones never pass
        self._most_seen = 0  # prompt tokens of one step
        self._stretch = 1.2

    def prompt_tokens(self, rows: int, left: int) -> int:
        """How many of the `left` tokens of the budget prompts may use beside `rows` decode rows.

        At least a page, whatever it costs, so that prompts advance. All, when no stream runs that could wait.
        """
        if self._target_s is None or rows == 0 or left <= self._least:
            return left
        if not self._cost:
            return self._least
        base, per_row, per_token = self._cost
        spare_s = self._target_s / self._stretch - base - per_row * rows
        most = min(left, max(self._least, self._most_seen * _GROWTH))
        if spare_s >= per_token * most:
            return most
        return max(self._least, int(spare_s / per_token)) if spare_s > 0.0 else self._least

    def predict(self, rows: int, prompt_tokens: int) -> float:
        """Seconds that a step is expected to take; 0 before the first was seen."""
        return sum(cost * size for cost, size in zip(self._cost, (1.0, rows, prompt_tokens), strict=False))

    def observe(self, rows: int, prompt_tokens: int, seconds: float) -> None:
        """A step of `rows` decode rows and `prompt_tokens` took `seconds`."""
        if self._target_s is None or not seconds > 0.0:
            return
        self._most_seen = max(self._most_seen, prompt_tokens)
        if not self._cost:
            self._begin(rows, prompt_tokens, seconds)
            return
        expected = self.predict(rows, prompt_tokens)
        if rows and prompt_tokens:  # only these are sized by it
            self._follow_stretch(seconds > expected * self._stretch)
        self._correct((1.0, float(rows), float(prompt_tokens)), seconds, expected)

    def _begin(self, rows: int, prompt_tokens: int, seconds: float) -> None:
        """The first step: half of it is taken for its base, the rest for what it computed."""
        work = max(1, rows + prompt_tokens)
        self._cost = [seconds / 2, seconds / 2 / work, seconds / 2 / work]
        scales = (seconds, seconds / max(1, min(rows, 4)), seconds / work)
        self._ease = [(spread * scale) ** 2 for spread, scale in zip(_SPREAD, scales, strict=True)]
        self._covariance = [[self._ease[i] if i == j else 0.0 for j in range(3)] for i in range(3)]

    def _follow_stretch(self, late: bool) -> None:
        """Up fast and down slowly, in the ratio at which `_LATE_SHARE` of the steps are late."""
        step = _STRETCH_STEP * (1.0 - _LATE_SHARE) if late else -_STRETCH_STEP * _LATE_SHARE
        low, high = _STRETCH_RANGE
        self._stretch = min(high, max(low, self._stretch * (1.0 + step)))

    def _correct(self, sizes: tuple[float, float, float], seconds: float, expected: float) -> None:
        """One step of a Kalman filter whose state is `_cost` and drifts; negative costs are cut off."""
        covariance, ease = self._covariance, self._ease
        for i in range(3):
            covariance[i][i] += _FORGET * ease[i]
        along = [sum(row[j] * sizes[j] for j in range(3)) for row in covariance]
        noise = _NOISE * max(seconds, expected)
        variance = sum(size * part for size, part in zip(sizes, along, strict=True)) + noise * noise
        limit = _OUTLIER * variance**0.5
        error = min(limit, max(-limit, seconds - expected))
        for i in range(3):
            self._cost[i] = max(0.0, self._cost[i] + along[i] / variance * error)
            for j in range(3):
                covariance[i][j] -= along[i] * along[j] / variance
        self._bound()

    def _bound(self) -> None:
        """Keeps the uncertainty of what is not seen for long (say, steps without prompts) from growing for ever."""
        scale = [min(1.0, (most / self._covariance[i][i]) ** 0.5) for i, most in enumerate(self._ease)]
        for i in range(3):
            for j in range(3):
                self._covariance[i][j] *= scale[i] * scale[j]
