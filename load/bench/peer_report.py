"""From the rounds of the peer benchmark to its table and its last line: medians with their spread, and ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles

from load.bench.peer_process import Round


@dataclass(frozen=True)
class Sample:
    """One round of one engine in one case."""

    tokens_per_s: float  # output tokens of all streams over the time of the last one's end
    ttft_ms: float  # median over the streams
    itl_p95_ms: float  # over all gaps between pieces of a stream; 0 when there are none
    tokens_per_piece: float
    cpu_s: float  # of all the engine's processes
    driver_cpu_s: float  # of the child alone: the client's, where the engine is a server
    others_cores: float  # cores that others kept busy meanwhile: a number well above 0 spoils the round


@dataclass(frozen=True)
class Spread:
    """Several rounds of one number."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.4g} [{self.low:.4g} – {self.high:.4g}]"


def sample(round: Round) -> Sample:
    """The numbers of a round."""
    streams, usage = round.streams, round.usage
    tokens = sum(len(stream.token_ids) for stream in streams)
    pieces = sum(len(stream.tokens) for stream in streams)
    gaps = [later - earlier for stream in streams for earlier, later in pairwise(stream.times_s)]
    return Sample(
        tokens_per_s=tokens / max(stream.times_s[-1] for stream in streams),
        ttft_ms=1000 * median(stream.times_s[0] for stream in streams),
        itl_p95_ms=1000 * _percentile(gaps, 95),
        tokens_per_piece=tokens / pieces,
        cpu_s=usage.cpu_s,
        driver_cpu_s=usage.driver_cpu_s,
        others_cores=max(0.0, usage.machine_cpu_s - usage.cpu_s) / round.wall_s,
    )


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value."""
    return Spread(median(values), min(values), max(values))


def ratios(ours: Sequence[Sample], theirs: Sequence[Sample]) -> Spread:
    """Ours over theirs in tokens per second, round by round: neighbours in time share what the machine did."""
    return spread([mine.tokens_per_s / other.tokens_per_s for mine, other in zip(ours, theirs, strict=True)])


def row(name: str, case: str, samples: Sequence[Sample], ours: Mapping[str, Sequence[Sample]]) -> dict[str, object]:
    """A row of the table and of the last line. ours: samples of our engines in this case, by name."""
    shown: dict[str, object] = {"engine": name, "case": case, "rounds": len(samples)}
    for field in Sample.__dataclass_fields__:
        values = spread([getattr(one, field) for one in samples])
        shown[field] = [round(value, 4) for value in (values.median, values.low, values.high)]
    for mine, mine_samples in ours.items():
        if mine != name:
            found = ratios(mine_samples, samples)
            shown[f"{mine} over this"] = [round(value, 3) for value in (found.median, found.low, found.high)]
    return shown


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """For people: one line a row, the median and in brackets the lowest and highest round."""
    return "\n".join("  ".join(_cell(key, value) for key, value in one.items()) for one in rows)


def _cell(key: str, value: object) -> str:
    if isinstance(value, list):
        return f"{key} {Spread(*value)}"
    return f"{value:<14}" if key in ("engine", "case") else f"{key} {value}"


def _percentile(values: Sequence[float], percent: int) -> float:
    if len(values) < 2:
        return values[0] if values else 0.0
    return quantiles(values, n=100, method="inclusive")[percent - 1]
