"""A scheduler on a device that computes nothing: a clock of its own, scripted answers, and a price for every step.

Where it stands in the flow: runs a generated workload (`load/workloads/`) for `load/bench/scheduler.py` and for tests,
in place of actors and workers. What comes out is compared with the script, token by token.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from statistics import mean, median

from load.workloads.tenants import STOP_TOKEN, Request
from minisgl_backend.messages.engine import EndReason, Progress, Sequence
from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.messages.plan import BatchPlan, StepResult
from minisgl_backend.messages.sampling import Sampling
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.scheduler.scheduler import Scheduler


@dataclass(frozen=True)
class Price:
    """Seconds of a step. Like a small model on one GPU: reading the weights costs as much as hundreds of tokens."""

    step_s: float = 0.005
    row_s: float = 0.00001  # a decode row: mostly the K/V that it reads
    token_s: float = 0.00002  # a prompt token
    spread: float = 0.0  # standard deviation of a step's seconds, as a share of them; always the same draws


@dataclass
class Device:
    """Answers plans, once through. Row → sequence by the seed of its admission, which is the request's number."""

    requests: list[Request]
    price: Price = field(default_factory=Price)
    prompt_tokens: int = 0  # computed in prompt chunks, and again after a retraction
    decoded_rows: int = 0
    steps: int = 0
    _slots: dict[int, Request] = field(default_factory=dict)
    _chance: random.Random = field(default_factory=lambda: random.Random(0))

    def run(self, plan: BatchPlan) -> tuple[StepResult, float]:
        """The plan's result and the seconds it took."""
        for admission in plan.admissions:
            self._slots[admission.slot] = self.requests[admission.sampling.seed]
        tokens, rows, chunk_tokens = [], 0, 0
        columns = zip(plan.row_slots, plan.row_starts, plan.row_lengths, plan.row_samples, strict=True)
        for slot, start, length, samples in columns:
            request = self._slots[slot]
            done = start + length - len(request.prompt)
            if length == 1 and done > 0:
                rows += 1
            else:
                chunk_tokens += length
            if samples:
                tokens.append(request.answer[done])
        self.steps += 1
        self.decoded_rows += rows
        self.prompt_tokens += chunk_tokens
        price = self.price
        seconds = price.step_s + price.row_s * rows + price.token_s * chunk_tokens
        return StepResult(plan.step, tuple(tokens)), seconds * max(0.5, self._chance.gauss(1.0, price.spread))


@dataclass
class Life:
    """A request as its client sees it, in seconds of the device's clock."""

    request: Request
    arrived_s: float
    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)  # of the tokens

    @property
    def first_s(self) -> float:
        return self.times_s[0]


@dataclass(frozen=True)
class Outcome:
    """What a run cost, and what its clients saw."""

    lives: list[Life]
    seconds: float
    steps: int
    prompt_tokens: int  # computed
    running: list[int]  # sequences with a slot, at every step

    @property
    def offered_tokens(self) -> int:
        return sum(len(life.request.prompt) for life in self.lives)

    @property
    def output_tokens(self) -> int:
        return sum(len(life.tokens) for life in self.lives)

    @property
    def mean_running(self) -> float:
        return mean(self.running)

    def ttft_s(self, priority: int | None = None) -> list[float]:
        """Ascending; of all, or of those of one priority."""
        chosen = [life for life in self.lives if priority is None or life.request.priority == priority]
        return sorted(life.first_s - life.arrived_s for life in chosen)

    @property
    def median_ttft_s(self) -> float:
        return median(self.ttft_s())


def to_sequence(request: Request) -> Sequence:
    """The request as the text actor would hand it on."""
    sampling = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=request.number, sample_index=0)
    return Sequence(
        SequenceId(request.number + 1),
        pack_tokens(request.prompt),
        sampling,
        request.max_new_tokens,
        (STOP_TOKEN,),
        request.priority,
    )


def simulate(scheduler: Scheduler, device: Device) -> Outcome:
    """Runs the device's workload to its end. Raises AssertionError when a token is lost, repeated or wrong."""
    run = _Run(scheduler, device)
    requests = device.requests
    run.to_the_end()
    for life in run.lives.values():
        assert tuple(life.tokens) == life.request.answer, f"request {life.request.number}: tokens lost or repeated"
    assert len(run.lives) == len(requests), f"{len(requests) - len(run.lives)} requests had no answer"
    lives = [run.lives[number] for number in sorted(run.lives)]
    return Outcome(lives, run.now, device.steps, device.prompt_tokens, run.running)


class _Run:
    """The clock, and who arrives when."""

    def __init__(self, scheduler: Scheduler, device: Device) -> None:
        self.scheduler = scheduler
        self.device = device
        self.now = 0.0
        self.lives: dict[int, Life] = {}
        self.running: list[int] = []
        self._arrivals = [(request.arrival_s, request.number) for request in device.requests if request.after is None]
        heapify(self._arrivals)
        self._next_turns = {request.after: request for request in device.requests if request.after is not None}

    def to_the_end(self) -> None:
        while self._arrivals or self.scheduler.has_work:
            if not self.scheduler.has_work:
                self.now = max(self.now, self._arrivals[0][0])
            while self._arrivals and self._arrivals[0][0] <= self.now:
                request = self.device.requests[heappop(self._arrivals)[1]]
                self.lives[request.number] = Life(request, self.now)
                self._take(self.scheduler.add(to_sequence(request), self.now))
            plan = self.scheduler.plan(self.now)
            assert plan is not None, "sequences wait and nothing is planned"
            self.running.append(self.scheduler.gauges().running)
            result, seconds = self.device.run(plan)
            self.now += seconds
            self._take(self.scheduler.apply(result, self.now))

    def _take(self, progress: Progress) -> None:
        for id, token in zip(progress.sequence_ids, progress.tokens, strict=True):
            life = self.lives[id - 1]
            life.tokens.append(token)
            life.times_s.append(self.now)
        for ended in progress.ended:
            assert ended.reason in (EndReason.STOP, EndReason.LENGTH), f"sequence {ended.id} ended as {ended.reason}"
            turn = self._next_turns.get(ended.id - 1)
            if turn is not None:
                heappush(self._arrivals, (self.now + turn.arrival_s, turn.number))
