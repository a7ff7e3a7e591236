"""`python -m load.bench.start` on the fake device: three starts, of which the last finds an engine."""

from __future__ import annotations

from load.bench.start import measure


def test_a_round_has_a_first_a_second_and_a_warm_start_with_their_stages() -> None:
    made_cold: list[bool] = []
    starts = measure(["--model", "smollm2"], lambda: made_cold.append(True), device="fake")
    assert [start.name for start in starts] == ["first", "second", "warm"] and made_cold == [True]
    for start in starts:
        assert "start" in start.stages
        rounding_s = 0.05 * (len(start.stages) + 1)
        assert 0 < sum(start.stages.values()) <= start.ready_s + rounding_s, "what is before the first is in no stage"
    assert [bool(start.engine) for start in starts] == [True, True, False]
