"""What `plan` and `apply` cost in a steady state: so many rows, so many waiting, so many tokens cached.

Where it stands in the flow: one part of `load/bench/scheduler.py`. CPU time of this thread, not wall time: other
processes on the machine do not count. There is no device; every row's token is the same.
"""

from __future__ import annotations

import gc
import random
import time
from dataclasses import dataclass, field
from statistics import median, quantiles

from minisgl_backend.messages.codec import encode
from minisgl_backend.messages.engine import Progress, Sequence
from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.messages.plan import BatchPlan, StepResult
from minisgl_backend.messages.sampling import GREEDY
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.scheduler.limits import Limits
from minisgl_backend.scheduler.order import Policy
from minisgl_backend.scheduler.scheduler import Scheduler

_TENANTS, _SYSTEM_TOKENS, _OWN_TOKENS = 64, 256, 192
_NEW_TOKENS = (64, 192)
_TOKEN = 7
_VOCABULARY = 30_000
_CHUNK_ROOM = 512  # tokens of the budget that decode rows leave


@dataclass(frozen=True)
class Case:
    """One steady state."""

    page_size: int = 16
    rows: int = 256
    waiting: int = 2000
    cached_tokens: int = 1_000_000
    policy: Policy = "fcfs"
    steps: int = 600


@dataclass
class Costs:
    """Milliseconds of CPU, one entry per step."""

    plan: list[float] = field(default_factory=list)
    apply: list[float] = field(default_factory=list)
    encode: list[float] = field(default_factory=list)  # the plan, once, and the progress
    rows: list[int] = field(default_factory=list)
    add: list[float] = field(default_factory=list)  # per sequence, not per step
    cached_tokens: int = 0  # at the end

    @property
    def both(self) -> list[float]:
        return [plan + apply for plan, apply in zip(self.plan, self.apply, strict=True)]


def p99(values: list[float]) -> float:
    """The 99th percentile."""
    return quantiles(values, n=100, method="inclusive")[-1]


def measure(case: Case, seed: int = 0) -> Costs:
    """Fills the tree, brings the rows to a steady state, and measures `case.steps` steps."""
    driver = _Driver(case, seed)
    driver.fill_tree()
    driver.fill_rows()
    gc.collect()
    gc.freeze()  # as the scheduler's process does once it is warm: a full collection would walk the tree
    try:
        return driver.measure()
    finally:
        gc.unfreeze()


class _Driver:
    """Adds whenever one is admitted, so that always as many wait."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case = case
        self.chance = random.Random(seed)
        held = case.rows * (_SYSTEM_TOKENS + _OWN_TOKENS + _NEW_TOKENS[1])
        self.scheduler = Scheduler(
            Limits(
                max_running=case.rows,
                token_budget=case.rows + _CHUNK_ROOM,
                page_size=case.page_size,
                num_pages=(case.cached_tokens + held) // case.page_size,
                context_tokens=8192,
                policy=case.policy,
            )
        )
        self.systems = [self._tokens(_SYSTEM_TOKENS) for _ in range(_TENANTS)]
        self.number = 0
        self.costs = Costs()

    def fill_tree(self) -> None:
        """Prompts come, are cached and go until the tree holds what the case asks for."""
        most = self.case.cached_tokens // self.case.page_size
        while self.scheduler.gauges().cached_pages < most:
            for _ in range(16):
                self._add(new_tokens=1)
            while self._step() is not None:
                pass

    def fill_rows(self) -> None:
        """Until every row decodes, and those that came first have gone."""
        for _ in range(self.case.rows + self.case.waiting):
            self._add()
        for _ in range(3 * _NEW_TOKENS[1]):
            self._step()
            self._refill()

    def measure(self) -> Costs:
        """The steps that count."""
        self.costs = Costs()
        for _ in range(self.case.steps):
            self._step()
            self._refill()
        self.costs.cached_tokens = self.scheduler.gauges().cached_pages * self.case.page_size
        return self.costs

    def _refill(self) -> None:
        while self.scheduler.gauges().waiting < self.case.waiting:
            sequence = self._sequence(self.chance.randint(*_NEW_TOKENS))
            made = time.thread_time_ns()
            self.scheduler.add(sequence, 0.0)
            self.costs.add.append((time.thread_time_ns() - made) / 1e6)

    def _step(self) -> BatchPlan | None:
        begin = time.thread_time_ns()
        plan = self.scheduler.plan(0.0)
        planned = time.thread_time_ns()
        if plan is None:
            return None
        result = StepResult(plan.step, (_TOKEN,) * sum(plan.row_samples))
        run = time.thread_time_ns()
        progress = self.scheduler.apply(result, 0.0)
        applied = time.thread_time_ns()
        self._encode(plan, progress)
        self.costs.plan.append((planned - begin) / 1e6)
        self.costs.apply.append((applied - run) / 1e6)
        self.costs.rows.append(len(plan.row_slots))
        return plan

    def _encode(self, plan: BatchPlan, progress: Progress) -> None:
        begin = time.thread_time_ns()
        encode(plan)
        encode(progress)
        self.costs.encode.append((time.thread_time_ns() - begin) / 1e6)

    def _add(self, new_tokens: int | None = None) -> None:
        self.scheduler.add(self._sequence(new_tokens or self.chance.randint(*_NEW_TOKENS)), 0.0)

    def _sequence(self, new_tokens: int) -> Sequence:
        self.number += 1
        prompt = self.chance.choice(self.systems) + self._tokens(_OWN_TOKENS)
        return Sequence(SequenceId(self.number), prompt, GREEDY, new_tokens, ())

    def _tokens(self, count: int) -> bytes:
        return pack_tokens(self.chance.choices(range(10, _VOCABULARY), k=count))


def describe(case: Case, costs: Costs) -> dict[str, float | str]:
    """One row of the table and of the last line."""
    return {
        "page_size": case.page_size,
        "rows": case.rows,
        "waiting": case.waiting,
        "cached_tokens": costs.cached_tokens,
        "policy": case.policy,
        "median_ms": round(median(costs.both), 3),
        "p99_ms": round(p99(costs.both), 3),
        "plan_ms": round(median(costs.plan), 3),
        "apply_ms": round(median(costs.apply), 3),
        "encode_ms": round(median(costs.encode), 4),
        "add_us": round(1000 * median(costs.add), 1),
    }
