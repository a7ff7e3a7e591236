"""A sequence that had to give its pages to an older one: what it keeps, and what may happen to it meanwhile."""

from __future__ import annotations

import pytest

from fakes.fake_worker import solo_run
from fakes.scheduler_bench import SchedulerBench
from minisgl_backend.messages.engine import EndReason
from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.messages.sampling import GREEDY, Sampling
from minisgl_backend.scheduler.limits import Limits
from minisgl_backend.scheduler.sequence import Phase

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


PROMPT = (5, 6, 7, 8, 9)


def crowded(depth: int, *, stop_token_ids: tuple[int, ...] = (), seed: int = 0) -> SchedulerBench:
    """Two sequences in a pool for little more than one, let in because outputs were short so far."""
    engine = SchedulerBench(Limits(4, 40, 2, 13, 256), depth=depth, early_uploads=True)
    for _ in range(200):
        engine.scheduler._lives.reserve.estimate.ended(1, 100)
    engine.add([1, 2, 3, 4], 20)
    engine.add(PROMPT, 20, stop_token_ids=stop_token_ids, sampling=seeded(seed))
    return engine


def seeded(seed: int) -> Sampling:
    return Sampling(0.0, 0, 1.0, seed, 0)


def phase(engine: SchedulerBench, id: int) -> Phase:
    return engine.scheduler._live[SequenceId(id)].phase


def until_retracted(engine: SchedulerBench) -> None:
    """Stops right after the plan that retracted the second sequence."""
    while True:
        planned = engine.plan()
        if engine.retractions:
            break
        if planned is None or not engine.depth:
            engine.apply()
    assert phase(engine, 2) is Phase.WAITING


@DEPTHS
def test_a_retracted_one_leaves_its_full_pages_to_the_cache_and_finds_those_that_nobody_needed(depth: int) -> None:
    engine = crowded(depth)
    until_retracted(engine)
    known = engine.scheduler._live[SequenceId(2)].known
    assert known > 6, "it has come some way"
    engine.finish()
    second = engine.life(SequenceId(2))
    assert second.tokens == solo_run(PROMPT, GREEDY, 20, ())[0]
    assert second.cached_tokens == 0, "told once, of its first admission"


def test_a_token_that_was_in_flight_at_the_retraction_is_kept_when_it_lands() -> None:
    engine = crowded(1)
    until_retracted(engine)
    before = len(engine.life(SequenceId(2)).tokens)
    engine.apply()
    assert phase(engine, 2) is Phase.WAITING
    assert len(engine.life(SequenceId(2)).tokens) == before + 1
    engine.finish()


def test_the_token_in_flight_may_be_its_last_so_that_a_waiting_one_ends() -> None:
    probe = crowded(1)
    until_retracted(probe)
    before = len(probe.life(SequenceId(2)).tokens)
    answers = (solo_run(PROMPT, seeded(seed), 20, ())[0] for seed in range(99))
    seed, stop = next((n, tokens[before]) for n, tokens in enumerate(answers) if tokens.index(tokens[before]) == before)
    engine = crowded(1, stop_token_ids=(stop,), seed=seed)
    until_retracted(engine)
    engine.apply()
    assert engine.life(SequenceId(2)).ended is EndReason.STOP
    engine.finish()


@DEPTHS
def test_it_is_not_admitted_again_while_a_step_that_names_it_is_in_flight(depth: int) -> None:
    engine = crowded(depth)
    until_retracted(engine)
    state = engine.scheduler._live[SequenceId(2)]
    while state.phase is Phase.WAITING:
        applied = engine.scheduler._lives.release.applied_step
        plan = engine.plan()
        if plan is not None and plan.admissions:
            assert plan.admissions[0].prompt == state.tokens, "its prompt is all it knew"
            assert state.known_at_admission == state.known and applied >= engine.steps - 1 - depth
        if plan is None or not depth:
            engine.apply()
    engine.finish()


@DEPTHS
def test_an_abort_finds_a_retracted_one_with_a_token_in_flight_and_ends_it_once(depth: int) -> None:
    engine = crowded(depth)
    until_retracted(engine)
    told = len(engine.life(SequenceId(2)).tokens)
    engine.abort(SequenceId(2))
    engine.abort(SequenceId(2))
    engine.finish()
    assert len(engine.life(SequenceId(2)).tokens) == told


@DEPTHS
def test_a_sampled_answer_goes_on_with_the_same_tokens_since_seeds_are_by_position(depth: int) -> None:
    engine = SchedulerBench(Limits(4, 40, 2, 13, 256), depth=depth, early_uploads=True)
    for _ in range(200):
        engine.scheduler._lives.reserve.estimate.ended(1, 100)
    sampling = Sampling(0.8, 5, 0.9, 77, 1)
    engine.add([1, 2, 3, 4], 20)
    second = engine.add([5, 6, 7, 8], 20, sampling=sampling)
    engine.finish()
    assert engine.retractions
    assert engine.life(second).tokens == solo_run([5, 6, 7, 8], sampling, 20, ())[0]


def test_pages_are_taken_from_the_youngest_and_never_from_one_that_is_older() -> None:
    engine = SchedulerBench(Limits(4, 40, 2, 16, 256))
    for _ in range(200):
        engine.scheduler._lives.reserve.estimate.ended(1, 100)
    ids = [engine.add([number, 2, 3, 4], 24) for number in range(4)]
    gone: list[SequenceId] = []
    while engine.scheduler.has_work:
        held = [id for id in ids if id in engine.scheduler._live and engine.scheduler._live[id].slot >= 0]
        engine.step()
        lost = [id for id in held if id in engine.scheduler._live and engine.scheduler._live[id].slot < 0]
        assert lost == held[len(held) - len(lost) :], f"of {held} it was {lost} who had to go"
        gone += lost
    assert gone and ids[0] not in gone
    engine.finish()
