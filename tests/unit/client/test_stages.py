"""What long work says of itself."""

from __future__ import annotations

import io
from collections.abc import Iterator

from minisgl_client.stages import Stages


def clock(*times: float) -> Iterator[float]:
    yield from times


def test_each_line_tells_the_time_and_the_summary_the_seconds_of_each_stage() -> None:
    out = io.StringIO()
    times = clock(0.0, 0.0, 1.0, 1.5, 4.0, 4.0, 4.0, 4.5, 9.0, 10.0)
    stages = Stages(out, lambda: next(times))
    stages.begin("fetch", "smollm2")
    stages.note("converting")
    stages.begin("load")
    stages.begin("load", "weights")
    stages.end()
    assert stages.summary() == "10.0 s (fetch 4.0, load 5.0)"
    assert out.getvalue().splitlines() == [
        "[   1.0 s] fetch     smollm2",
        "[   1.5 s] fetch     converting",
        "[   4.0 s] load",
        "[   4.5 s] load      weights",
    ]
