"""What is not finite stays with the sequence that made it, and with those who read what it wrote: they fail, and never
get a token that only looks right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fakes.plans import Planner, generate
from fakes.random_model import write_random_llama
from fakes.tiny_model import make_tiny_llama
from minisgl_backend.config import resolve_config
from minisgl_backend.messages.engine import Ended, EndReason, Sequence
from minisgl_backend.messages.ids import SequenceId, SlotId, StepId
from minisgl_backend.messages.plan import NO_TOKEN, Admission, BatchPlan, PageGrant
from minisgl_backend.messages.sampling import GREEDY
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.scheduler.limits import Limits
from minisgl_backend.scheduler.scheduler import Scheduler
from minisgl_backend.worker.build import build_runner
from minisgl_backend.worker.runner import StepRunner

POISON = 319
BROKEN = [5] * 10 + [POISON] + [6] * 40
PAGE_SIZE = 16


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[StepRunner]:
    """A model whose embedding of one token is not finite."""
    yield from poisoned(make_tiny_llama(tmp_path, tie_word_embeddings=False))


@pytest.fixture
def windowed_runner(tmp_path: Path) -> Iterator[StepRunner]:
    """The same of two layers with a window of 8, so that no token knows of what was 15 tokens before it."""
    shape = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8}
    yield from poisoned(write_random_llama(tmp_path, tie_word_embeddings=False, **shape))


def poisoned(folder: Path) -> Iterator[StepRunner]:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    settings = {"device": "cpu", "dtype": "fp32", "max_running": 4, "context_tokens": 128, "threads": 1}
    runner = build_runner(resolve_config({**settings, "page_size": PAGE_SIZE}), folder)
    runner.warm_up()
    yield runner
    runner.close()


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 50, 64])
def test_a_broken_prompt_fails_in_whatever_chunks_it_is_computed(runner: StepRunner, chunk_tokens: int) -> None:
    planner = Planner(PAGE_SIZE, runner.num_pages)
    planner.admit(0, BROKEN)
    while True:
        plan = planner.plan([(0, chunk_tokens)])
        result = runner.run(plan)
        if plan.row_samples[0]:
            break
    assert result.tokens == (NO_TOKEN,)


def test_who_holds_the_pages_of_a_broken_sequence_next_never_notices(runner: StepRunner) -> None:
    planner = Planner(PAGE_SIZE, runner.num_pages)
    sound = [[7] * 21, [8] * 3]
    before = generate(runner.run, planner, sound, 20)
    for slot in range(2):
        planner.admit(slot, BROKEN)
    planner.apply(runner.run(planner.plan([(0, 64), (1, 64)])))
    assert generate(runner.run, planner, sound, 20) == before


def test_who_shares_the_pages_of_a_broken_prompt_fails_too_and_nothing_of_it_stays_cached(runner: StepRunner) -> None:
    scheduler = Scheduler(
        Limits(max_running=4, token_budget=128, page_size=PAGE_SIZE, num_pages=runner.num_pages, context_tokens=128)
    )
    ids = [SequenceId(1), SequenceId(2)]
    for id in ids:
        scheduler.add(Sequence(id, pack_tokens([*BROKEN, id]), GREEDY, 5, ()), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None and plan.row_starts == (0, 48), "the second reads what the first writes"
    assert scheduler.apply(runner.run(plan), 0.0).ended == tuple(Ended(id, EndReason.FAILED) for id in ids)
    assert scheduler.gauges().cached_pages == 0


@pytest.mark.parametrize("chunk_tokens", [1, 10, 30, 60, 120])
def test_who_has_left_the_broken_token_behind_ends_well_and_its_pages_before_that_are_sound(
    windowed_runner: StepRunner, chunk_tokens: int
) -> None:
    """No scheduler takes the pages of a sequence that ended well from the cache, so what is computed beside a broken
    token must not be spoilt by it. Without windows such a sequence fails, and its pages go.
    """
    prompt, other = [*range(40, 60), POISON, *range(60, 120)], list(range(200, 230))
    expected = first_token(windowed_runner, 0, [*prompt[:20], 5, *prompt[21:]], range(8), 0, chunk_tokens)
    alone = first_token(windowed_runner, 1, [*prompt[:16], *other], range(8, 16), 0, chunk_tokens)
    assert first_token(windowed_runner, 2, prompt, range(16, 24), 0, chunk_tokens) == expected != NO_TOKEN
    shared = [16, *range(24, 31)]
    assert first_token(windowed_runner, 3, [*prompt[:16], *other], shared, 16, chunk_tokens) == alone != NO_TOKEN
    assert first_token(windowed_runner, 0, [*prompt, POISON], range(8), 0, chunk_tokens) == NO_TOKEN


def first_token(
    runner: StepRunner, slot: int, prompt: list[int], pages: Iterable[int], start: int, chunk_tokens: int
) -> int:
    """Runs the prompt from `start` on; what is before it lies in the first pages."""
    admissions: tuple[Admission, ...] = (Admission(SlotId(slot), pack_tokens(prompt), GREEDY),)
    pages, held = list(pages), 0
    tokens: tuple[int, ...] = ()
    while start < len(prompt):
        length = min(chunk_tokens, len(prompt) - start)
        grants: tuple[PageGrant, ...] = ()
        if (need := -(-(start + length) // PAGE_SIZE)) > held:
            grants, held = (PageGrant(SlotId(slot), tuple(pages[held:need])),), need
        step = StepId(runner._last_step + 1)  # type: ignore[attr-defined]
        sample = int(start + length == len(prompt))
        tokens = runner.run(BatchPlan(step, admissions, grants, (slot,), (start,), (length,), (sample,))).tokens
        admissions, start = (), start + length
    return tokens[0]
