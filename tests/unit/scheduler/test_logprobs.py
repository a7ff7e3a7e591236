"""Logprobs on their way through the scheduler, and prompts that are computed whole because theirs are asked for."""

from __future__ import annotations

import msgspec
import pytest

from fakes.scheduler_bench import SchedulerBench
from minisgl_backend.messages.engine import EndReason
from minisgl_backend.messages.sampling import GREEDY, Sampling
from minisgl_backend.messages.tokens import unpack_tokens
from minisgl_backend.scheduler.limits import Limits

ASKS: Sampling = msgspec.structs.replace(GREEDY, logprobs=0)
ASKS_OF_PROMPT: Sampling = msgspec.structs.replace(GREEDY, prompt_logprobs=0)
BOTH: Sampling = msgspec.structs.replace(GREEDY, logprobs=0, prompt_logprobs=0)
PROMPT = [place % 23 for place in range(20)]


def bench(depth: int = 0, **limits: int) -> SchedulerBench:
    sizes = {"max_running": 4, "token_budget": 64, "page_size": 4, "num_pages": 64, "context_tokens": 100, **limits}
    return SchedulerBench(Limits(**sizes), depth=depth)  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_prompt_whose_logprobs_are_asked_for_is_computed_whole_and_cached_for_others(depth: int) -> None:
    engine = bench(depth)
    engine.add(PROMPT, 3)
    engine.finish()
    before = engine.worker.prefill_tokens
    asked = engine.add(PROMPT, 3, sampling=ASKS_OF_PROMPT)
    engine.finish()
    assert engine.worker.prefill_tokens - before == len(PROMPT)
    assert engine.life(asked).cached_tokens == 0
    first = engine.add([7, *PROMPT], 3, sampling=ASKS_OF_PROMPT)
    engine.finish()
    reader = engine.add([7, *PROMPT], 3)
    engine.finish()
    assert (engine.life(first).cached_tokens, engine.life(reader).cached_tokens) == (0, 20)


def test_it_does_not_read_what_others_compute_in_the_same_step() -> None:
    engine = bench()
    for sampling in (GREEDY, ASKS_OF_PROMPT, GREEDY):
        engine.add(PROMPT, 2, sampling=sampling)
    plan = engine.plan()
    assert plan is not None and plan.row_starts == (0, 0, 16)
    engine.apply()
    engine.finish()


def test_prompt_logprobs_come_with_each_chunk_and_before_the_first_token() -> None:
    engine = bench(token_budget=8)
    engine.add(PROMPT, 2, sampling=ASKS_OF_PROMPT)
    places = []
    for _ in range(3):
        progress = engine.step()
        (told,) = progress.prompt_logprobs
        places.append((told.logprobs.position, list(unpack_tokens(told.logprobs.ids)), len(progress.tokens)))
    assert places == [(1, PROMPT[1:9], 0), (9, PROMPT[9:17], 0), (17, PROMPT[17:], 1)]
    assert engine.step().prompt_logprobs == ()
    engine.finish()


@pytest.mark.parametrize("depth", [0, 1])
def test_after_a_retraction_outputs_are_outputs_and_nothing_is_told_twice_of_them(depth: int) -> None:
    """The bench compares what is told with the tokens, each once; what was sampled before is not taken for a prompt."""
    engine = bench(depth, num_pages=14, max_running=3)
    for number in range(3):
        engine.add([number, *PROMPT[:9]], 24, sampling=BOTH)
    engine.finish()
    assert engine.retractions > 0


@pytest.mark.parametrize("depth", [0, 1])
def test_after_a_failed_step_prompts_are_told_again_and_the_steps_behind_it_tell_nothing(depth: int) -> None:
    engine = bench(depth, token_budget=16)
    for _ in range(2):
        engine.add(PROMPT, 5, sampling=BOTH)
    engine.step()
    engine.plan()
    if depth:
        engine.plan()
    assert engine.fail().prompt_logprobs == ()
    engine.finish()


def test_logprobs_of_tokens_that_come_too_late_are_dropped_with_them() -> None:
    engine = bench(1)
    gone = engine.add(PROMPT, 9, sampling=ASKS)
    stays = engine.add(PROMPT, 3, sampling=ASKS)
    engine.step()
    engine.plan()
    engine.abort(gone)
    progress = engine.apply()
    assert progress.sequence_ids == (stays,) and [told.id for told in progress.logprobs] == [stays]
    engine.finish()
    assert engine.life(gone).ended is EndReason.ABORT
