"""An abort is answered once, in every phase, and everything comes back: neither early nor twice nor never."""

from __future__ import annotations

import pytest

from fakes.fake_worker import solo_run
from fakes.scheduler_bench import SchedulerBench
from minisgl_backend.messages.engine import Ended, EndReason, Progress
from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.messages.sampling import GREEDY
from minisgl_backend.scheduler.limits import Limits

EMPTY = Progress((), (), ())
DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def bench(depth: int) -> SchedulerBench:
    return SchedulerBench(Limits(2, 8, 4, 8, 256), depth=depth, early_uploads=True)


@DEPTHS
def test_a_waiting_sequence_leaves_the_queue_and_the_next_one_moves_up(depth: int) -> None:
    engine = bench(depth)
    first, second, third, fourth = (engine.add([number] * 2, 3) for number in range(4))
    engine.step()
    assert engine.scheduler.abort(third) == Progress((), (), (Ended(third, EndReason.ABORT),))
    engine.life(third).ended = EndReason.ABORT
    engine.finish()
    for id in (first, second, fourth):
        assert engine.life(id).ended is EndReason.LENGTH


@DEPTHS
def test_a_sequence_whose_prompt_is_half_planned_and_in_flight_is_released_once(depth: int) -> None:
    engine = bench(depth)
    id = engine.add([1] * 20, 5)
    assert engine.plan() is not None
    engine.abort(id)
    gauges = engine.scheduler.gauges()
    assert (gauges.free_pages, gauges.evictable_pages) == (6, 2), "the step will fill the two pages of the first chunk"
    assert gauges.free_slots == 1
    engine.apply()
    assert engine.scheduler.gauges().free_slots == 2
    engine.finish()


@DEPTHS
def test_a_half_planned_prompt_between_two_steps_is_free_at_once(depth: int) -> None:
    engine = bench(depth)
    id = engine.add([1] * 20, 5)
    engine.step()
    engine.abort(id)
    gauges = engine.scheduler.gauges()
    assert gauges.free_pages + gauges.evictable_pages == 8
    assert engine.plan() is None
    engine.finish()


@DEPTHS
def test_a_decoding_sequence_in_flight_gets_no_token_after_its_end(depth: int) -> None:
    engine = bench(depth)
    id, other = engine.add([1, 2], 9), engine.add([3, 4], 9)
    engine.step()
    assert engine.plan() is not None
    engine.abort(id)
    progress = engine.apply()
    assert progress.sequence_ids == (other,)
    engine.finish()
    assert (len(engine.life(id).tokens), len(engine.life(other).tokens)) == (1, 9)


@DEPTHS
def test_an_abort_of_an_ended_an_unknown_or_an_aborted_sequence_is_not_answered(depth: int) -> None:
    engine = bench(depth)
    done, aborted = engine.add([1, 2], 1), engine.add([3, 4], 9)
    engine.step()
    engine.abort(aborted)
    assert engine.life(done).ended is EndReason.LENGTH
    for id in (done, aborted, SequenceId(77)):
        assert engine.scheduler.abort(id) == EMPTY
    engine.scheduler.check_integrity()
    engine.finish()


@DEPTHS
def test_an_aborted_sequences_pages_and_slot_serve_the_next_without_a_trace(depth: int) -> None:
    """One slot and few pages: whoever comes next gets those of the aborted, which the step in flight still writes."""
    engine = SchedulerBench(Limits(1, 8, 4, 3, 256), depth=depth, early_uploads=True)
    for number in range(6):
        aborted, kept = engine.add([number] * 9, 4), engine.add([number + 1] * 7, 4)
        assert engine.plan() is not None
        engine.abort(aborted)
        engine.finish()
        assert engine.life(kept).tokens == solo_run([number + 1] * 7, GREEDY, 4, ())[0]


@DEPTHS
def test_an_id_may_come_again_after_its_end_and_gets_nothing_of_its_former_life(depth: int) -> None:
    engine = bench(depth)
    id = engine.add([1, 2], 9)
    sequence = engine.life(id).sequence
    assert engine.plan() is not None
    engine.abort(id)
    assert engine.scheduler.add(sequence, 0.0) == EMPTY
    late = engine.scheduler.apply(engine.worker.run(), 0.0)
    assert late == EMPTY
    engine.scheduler.check_integrity()
    assert engine.scheduler.gauges().waiting == 1


def test_an_abort_teaches_the_reserve_nothing() -> None:
    engine = bench(0)
    id = engine.add([1, 2], 20)
    engine.step()
    estimate = engine.scheduler._lives.reserve.estimate
    before = (estimate.share, estimate.margin)
    engine.abort(id)
    assert (estimate.share, estimate.margin) == before
