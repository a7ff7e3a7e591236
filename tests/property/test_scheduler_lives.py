"""Random lives of sequences in scheduler, allocator and a page-exact fake worker: what must hold whatever happens.

SchedulerBench and FakeWorker check after every operation: integrity, the budget, one terminal event each, no page or
slot handed out that an unapplied step names, tables that only grow, a row for the oldest at least every second step,
and tokens equal to the solo run.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from fakes.fake_worker import FAILING_SEED, VOCABULARY
from fakes.scheduler_bench import SchedulerBench
from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.messages.sampling import GREEDY, Sampling
from minisgl_backend.scheduler.limits import Limits

TOKENS = st.integers(0, VOCABULARY - 1)


@st.composite
def limits_of_a_small_engine(draw: Any) -> Limits:
    page_size = draw(st.sampled_from([1, 2, 3, 16]))
    max_running = draw(st.integers(1, 5))
    return Limits(
        max_running=max_running,
        token_budget=max_running + page_size + draw(st.integers(0, 24)),
        page_size=page_size,
        num_pages=draw(st.integers(1, 40 // page_size + 2)),
        context_tokens=draw(st.integers(2, 60)),
    )


@st.composite
def samplings(draw: Any) -> Sampling:
    seed = draw(st.integers(0, 3))
    fails = draw(st.integers(0, 7)) == 0
    return Sampling(GREEDY.temperature, GREEDY.top_k, GREEDY.top_p, seed | FAILING_SEED if fails else seed, 0)


class Lives(RuleBasedStateMachine):
    bench: SchedulerBench

    @initialize(limits=limits_of_a_small_engine(), depth=st.integers(0, 1), early_uploads=st.booleans())
    def start(self, limits: Limits, depth: int, early_uploads: bool) -> None:
        self.bench = SchedulerBench(limits, depth=depth, early_uploads=early_uploads)

    @rule(
        prompt=st.lists(TOKENS, min_size=1, max_size=50) | st.lists(TOKENS, min_size=1, max_size=6),
        max_new_tokens=st.integers(1, 12) | st.integers(1, 60),
        stop_token_ids=st.just(()) | st.sets(TOKENS, min_size=1, max_size=4).map(lambda ids: tuple(sorted(ids))),
        sampling=samplings(),
        copies=st.integers(1, 3),
    )
    def arrive(
        self, prompt: list[int], max_new_tokens: int, stop_token_ids: tuple[int, ...], sampling: Sampling, copies: int
    ) -> None:
        for _ in range(copies):
            self.bench.add(prompt, max_new_tokens, stop_token_ids=stop_token_ids, sampling=sampling)

    @rule()
    def plan(self) -> None:
        self.bench.plan()

    @precondition(lambda self: self.bench.scheduler.in_flight)
    @rule()
    def apply(self) -> None:
        self.bench.apply()

    @rule(steps=st.integers(2, 12))
    def run_some_steps(self, steps: int) -> None:
        for _ in range(steps):
            if self.bench.plan() is None and self.bench.scheduler.in_flight:
                self.bench.apply()

    @rule(back=st.integers(0, 8))
    def abort(self, back: int) -> None:
        """One of the last arrivals, in whatever phase; at times an id that never was."""
        self.bench.abort(SequenceId(len(self.bench.lives) - back + 1))

    @rule()
    def drain(self) -> None:
        """Everybody gets the end that is due, and everything comes back."""
        self.bench.finish()

    def teardown(self) -> None:
        if hasattr(self, "bench") and self.bench.sound:
            self.bench.finish()


@pytest.mark.slow
def test_whatever_happens_each_sequence_gets_its_solo_answer_once_and_everything_comes_back() -> None:
    some = settings()
    run_state_machine_as_test(Lives, settings=settings(some, max_examples=some.max_examples // 3))  # twenty lives each
