"""Reported faults of other servers about aborts, on the scheduler with a page-exact fake model.

AB-01 sgl-project/sglang#36876; AB-02 sgl-project/sglang#34113; AB-06 sgl-project/sglang#36894;
AB-07 sgl-project/sglang#30233. AB-01 and AB-03 with real clients: tests/e2e/test_load.py, tests/e2e/test_surface.py.
"""

from __future__ import annotations

import random

import pytest

from fakes.scheduler_bench import SchedulerBench
from minisgl_backend.config import resolve_config
from minisgl_backend.errors import ConfigError, UnsupportedFeature
from minisgl_backend.messages.engine import EndReason, Progress
from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.scheduler.limits import Limits
from minisgl_backend.text.parameters import parse_parameters

NOTHING = Progress((), (), ())


@pytest.mark.parametrize("depth", [0, 1])
def test_ab_01_an_abort_between_any_two_calls_frees_everything(depth: int) -> None:
    """Two hundred streams, each left at another moment: before its first row, between two steps, under a step."""
    draw = random.Random(5)
    engine = SchedulerBench(Limits(16, 96, 4, 200, 256), depth=depth, early_uploads=True)
    leaving: dict[SequenceId, int] = {}
    calls = 0
    while len(engine.lives) < 200 or leaving:
        if len(engine.lives) < 200:
            prompt = [draw.randrange(3) for _ in range(draw.randrange(1, 40))]
            leaving[engine.add(prompt, 2000)] = calls + draw.randrange(0, 60)
        for call in (engine.plan, engine.apply):
            if call == engine.plan or engine.scheduler.in_flight:
                call()
            calls += 1
            for id in [id for id, when in leaving.items() if when <= calls]:
                del leaving[id]
                engine.abort(id)
    engine.finish()
    assert {life.ended for life in engine.lives.values()} <= {EndReason.ABORT, EndReason.LENGTH}
    gauges = engine.scheduler.gauges()
    assert (gauges.running, gauges.waiting, gauges.free_slots) == (0, 0, 16)


@pytest.mark.parametrize("depth", [0, 1])
def test_ab_02_an_abort_ends_a_stream_at_once_and_unknown_or_second_ones_are_harmless(depth: int) -> None:
    engine = SchedulerBench(Limits(4, 32, 4, 64, 256), depth=depth)
    stream, other = engine.add([1, 2, 3], 200), engine.add([4, 5, 6], 20)
    for _ in range(5):
        engine.step()
    engine.abort(stream)
    assert engine.life(stream).ended is EndReason.ABORT, "told by the call itself, not some steps later"
    for id in (stream, SequenceId(4711), stream):
        assert engine.scheduler.abort(id) == NOTHING
    engine.finish()
    assert engine.life(other).ended is EndReason.LENGTH


def test_ab_06_adapters_are_refused_by_name_until_they_are_built() -> None:
    with pytest.raises(UnsupportedFeature, match="lora_name"):
        parse_parameters(b'{"lora_name": "x"}')
    with pytest.raises(ConfigError, match="unknown setting 'lora_modules'"):
        resolve_config({"lora_modules": ["x"]})


@pytest.mark.parametrize("name", ["disaggregation", "disaggregation_mode", "kv_transfer"])
def test_ab_07_prefill_and_decode_apart_are_refused_by_name_until_they_are_built(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting '{name}'"):
        resolve_config({name: "prefill"})
