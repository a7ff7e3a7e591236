"""Random lives of sequences in scheduler, cache and a page-exact fake worker: what must hold whatever happens.

SchedulerBench and FakeWorker check after every operation: integrity, the budget, one terminal event each, no page or
slot handed out that an unapplied step names, tables that only grow, nobody writing what others read, a row for the
oldest at least every second step, a bound on every wait, and tokens equal to the solo run: so they depend neither on
chunks nor on order, pool, depth or what was cached.

Two profiles: `general` mixes everything; `pressure` has pools of a few pages, prompts that share most of what they
hold and long answers, so that it evicts, stalls and retracts all the time. `make fuzz` runs 25,000 machines of each,
with some forty sequences in one; `make test` a hundred and twenty-five.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from fakes.fake_worker import FAILING_SEED, VOCABULARY
from fakes.scheduler_bench import SchedulerBench
from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.messages.sampling import GREEDY, NO_LOGPROBS, Sampling
from minisgl_backend.scheduler.limits import Limits

TOKENS = st.integers(0, VOCABULARY - 1)
HEADS = tuple(tuple((7 * place + 3 * head) % VOCABULARY for place in range(64)) for head in range(3))
"""Prompts begin with a piece of one of these: the first tokens of the heads differ."""


@st.composite
def limits_of_a_small_engine(draw: Any, tight: bool) -> Limits:
    page_size = draw(st.sampled_from([1, 2, 16] if tight else [1, 2, 3, 16]))
    max_running = draw(st.integers(2, 8) if tight else st.integers(1, 5))
    policy = draw(st.sampled_from(["fcfs", "fcfs", "lpm", "dfs-weight", "priority"]))
    mixed = tight or draw(st.integers(0, 4)) > 0
    return Limits(
        max_running=max_running,
        token_budget=max_running + page_size + draw(st.integers(0, 24)),
        page_size=page_size,
        num_pages=draw(st.integers(2, 6) if page_size == 16 else st.integers(6, 48 // page_size)) if tight
        else draw(st.integers(1, 60 // page_size + 2)),
        context_tokens=draw(st.integers(30, 60) if tight else st.integers(2, 60)),
        policy=policy,
        reserve="learned" if tight else draw(st.sampled_from(["learned", "learned", "full"])),
        prefix_cache=tight or draw(st.integers(0, 4)) > 0,
        mixed=mixed,
        target_itl_ms=draw(st.sampled_from([0.0, 0.0, 700.0])) if mixed else 0.0,
        preempt=policy == "priority" and draw(st.booleans()),
    )  # fmt: skip


@st.composite
def samplings(draw: Any) -> Sampling:
    seed = draw(st.integers(0, 3))
    fails = draw(st.integers(0, 7)) == 0
    logprobs, prompt_logprobs = (draw(st.sampled_from([NO_LOGPROBS, NO_LOGPROBS, 0])) for _ in range(2))
    return Sampling(
        GREEDY.temperature,
        GREEDY.top_k,
        GREEDY.top_p,
        seed | FAILING_SEED if fails else seed,
        0,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


@st.composite
def prompts(draw: Any) -> list[int]:
    head = HEADS[draw(st.integers(0, 2))][: draw(st.integers(0, 40))]
    tail = draw(st.lists(TOKENS, min_size=0 if head else 1, max_size=12))
    return [*head, *tail]


class Lives(RuleBasedStateMachine):
    tight = False
    bench: SchedulerBench

    @initialize(data=st.data(), depth=st.integers(0, 1), early_uploads=st.booleans(), fails=st.integers(0, 3))
    def start(self, data: Any, depth: int, early_uploads: bool, fails: int) -> None:
        self.fails = fails == 0  # not always: after a failure few sequences run for a long time
        limits = data.draw(limits_of_a_small_engine(self.tight))
        self.bench = SchedulerBench(limits, depth=depth, early_uploads=early_uploads)

    @rule(
        prompt=prompts(),
        max_new_tokens=st.integers(1, 12) | st.integers(1, 60),
        stop_token_ids=st.just(()) | st.sets(TOKENS, min_size=1, max_size=4).map(lambda ids: tuple(sorted(ids))),
        sampling=samplings(),
        copies=st.integers(1, 3),
        priority=st.integers(0, 2),
        patience_s=st.none() | st.integers(0, 6),
        cache_salt=st.sampled_from([b"", b"", b"salt"]),
    )
    def arrive(
        self,
        prompt: list[int],
        max_new_tokens: int,
        stop_token_ids: tuple[int, ...],
        sampling: Sampling,
        copies: int,
        priority: int,
        patience_s: int | None,
        cache_salt: bytes,
    ) -> None:
        for _ in range(copies):
            self.bench.add(
                prompt,
                max_new_tokens,
                stop_token_ids=stop_token_ids,
                sampling=sampling,
                priority=priority,
                deadline_s=None if patience_s is None else self.bench.now + patience_s,
                cache_salt=cache_salt,
            )

    @precondition(lambda self: self.bench.lives)
    @rule(back=st.integers(0, 6), more=st.lists(TOKENS, max_size=6), max_new_tokens=st.integers(1, 30))
    def go_on(self, back: int, more: list[int], max_new_tokens: int) -> None:
        """A conversation: what somebody asked and was told so far, and a bit more."""
        lives = list(self.bench.lives.values())
        life = lives[-1 - back % len(lives)]
        self.bench.add([*life.prompt, *life.tokens, *more], max_new_tokens, cache_salt=life.sequence.cache_salt)

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

    @precondition(lambda self: self.fails and self.bench.scheduler.in_flight)
    @rule()
    def fail(self) -> None:
        """The device can not run the oldest step in flight, nor what was planned on top of it."""
        self.bench.fail()

    @rule(back=st.integers(0, 8))
    def abort(self, back: int) -> None:
        """One of the last arrivals, in whatever phase; at times an id that never was."""
        self.bench.abort(SequenceId(len(self.bench.lives) - back + 1))

    @rule(seed=st.integers(0, 1 << 30), calls=st.integers(10, 100))
    def storm(self, seed: int, calls: int) -> None:
        """Many calls in a row, as to a busy engine: Hypothesis by itself makes short lives that seldom meet."""
        draw = random.Random(seed)
        for _ in range(calls):
            self._any_call(draw)

    def _any_call(self, draw: random.Random) -> None:
        bench, kind = self.bench, draw.random()
        if kind < 0.22 and bench.scheduler.gauges().waiting < 12:
            head = draw.choice(HEADS)[: draw.randrange(12 if self.tight else 40)]
            prompt = [*head, *(draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 5)))]
            stops = tuple(sorted(draw.sample(range(VOCABULARY), 4))) if draw.random() < 0.6 else ()
            deadline_s = bench.now + draw.randrange(1, 9) if draw.random() < 0.05 else None
            seed = draw.randrange(3) | (FAILING_SEED if draw.random() < 0.03 else 0)
            asks = [0 if draw.random() < 0.2 else NO_LOGPROBS for _ in range(2)]
            sampling = Sampling(0.0, 0, 1.0, seed, 0, logprobs=asks[0], prompt_logprobs=asks[1])
            for _ in range(draw.choice([1, 1, 1, 2])):
                bench.add(
                    prompt,
                    draw.randrange(1, 50),
                    stop_token_ids=stops,
                    sampling=sampling,
                    priority=draw.randrange(3),
                    deadline_s=deadline_s,
                    cache_salt=draw.choice([b"", b"", b"", b"salt"]),
                )
        elif kind < 0.25 and bench.lives:
            bench.abort(SequenceId(len(bench.lives) - draw.randrange(min(9, len(bench.lives)))))
        elif kind < 0.255 and self.fails and bench.scheduler.in_flight:
            bench.fail()
        elif kind < 0.28:
            bench.now += 1
        elif kind < 0.7 or not bench.scheduler.in_flight:
            bench.plan()
        else:
            bench.apply()

    @rule(seconds=st.integers(1, 4))
    def wait(self, seconds: int) -> None:
        self.bench.now += seconds

    @rule()
    def drain(self) -> None:
        """Everybody gets the end that is due, and everything comes back."""
        self.bench.finish()

    def teardown(self) -> None:
        if hasattr(self, "bench") and self.bench.sound:
            self.bench.finish()


class LivesUnderPressure(Lives):
    tight = True


@pytest.mark.slow
@pytest.mark.parametrize("machine", [Lives, LivesUnderPressure], ids=["general", "pressure"])
def test_whatever_happens_each_sequence_gets_its_solo_answer_once_and_everything_comes_back(
    machine: type[Lives],
) -> None:
    some = settings()
    runs = 25_000 if some.max_examples > 1000 else 125
    run_state_machine_as_test(machine, settings=settings(some, max_examples=runs))
