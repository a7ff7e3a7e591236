"""What sharing and retraction bring, in numbers that are promised (issue: the scheduler and the radix cache, whole)."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from fakes.scheduler_bench import SchedulerBench
from minisgl_backend.messages.engine import EndReason, Sequence
from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.messages.plan import StepResult
from minisgl_backend.messages.sampling import Sampling
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.scheduler.limits import Limits
from minisgl_backend.scheduler.scheduler import Scheduler

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


@DEPTHS
@pytest.mark.parametrize("page_size", [16, 1])
@pytest.mark.parametrize("at_once", [True, False], ids=["all at once", "one by one"])
def test_sixteen_prompts_of_400_shared_and_16_own_tokens_compute_656_and_not_6656(
    at_once: bool, page_size: int, depth: int
) -> None:
    engine = SchedulerBench(Limits(16, 1024, page_size, 8192 // page_size, 1024), depth=depth)
    head = [(3 * place) % 23 for place in range(400)]
    for number in range(16):
        engine.add([*head, *[(number + place) % 23 for place in range(16)]], 2)
        if not at_once:
            engine.finish()
    engine.finish()
    assert engine.worker.prefill_tokens <= 656
    assert sum(life.cached_tokens or 0 for life in engine.lives.values()) >= 15 * 400


@DEPTHS
def test_n_samples_of_one_prompt_compute_it_once_and_less_than_a_page_each(depth: int) -> None:
    engine = SchedulerBench(Limits(8, 1024, 16, 512, 1024), depth=depth)
    prompt = [(3 * place) % 23 for place in range(411)]
    for index in range(8):
        engine.add(prompt, 5, sampling=Sampling(0.0, 0, 1.0, 100 + index, index))
    engine.finish()
    assert engine.worker.prefill_tokens <= 411 + 7 * 15


@dataclass
class ScriptedRun:
    """A scheduler whose sequence i says token 2, 3, 4 … (never the same twice in a row) and the stop token at the end
    of its script, which nobody knows before."""

    limits: Limits
    depth: int
    lengths: list[int]
    told: dict[SequenceId, list[int]] = field(default_factory=dict)
    ends: dict[SequenceId, EndReason] = field(default_factory=dict)
    running: list[int] = field(default_factory=list)  # in each step, while somebody waits
    steps: int = 0

    def run(self, prompt_tokens: int, max_new_tokens: int) -> None:
        scheduler = Scheduler(self.limits, self.depth)
        for number, _ in enumerate(self.lengths):
            prompt = pack_tokens([number + 1] * prompt_tokens)
            sampling = Sampling(0.0, 0, 1.0, number, 0)
            scheduler.add(Sequence(SequenceId(number), prompt, sampling, max_new_tokens, (1,)), 0.0)
            self.told[SequenceId(number)] = []
        in_flight: list[StepResult] = []
        slots: dict[int, int] = {}
        while scheduler.has_work or in_flight:
            plan = scheduler.plan(0.0)
            if plan is not None:
                slots.update((admission.slot, admission.sampling.seed) for admission in plan.admissions)
                rows = zip(plan.row_slots, plan.row_starts, plan.row_lengths, plan.row_samples, strict=True)
                tokens = [
                    self.token(slots[slot], start + length - prompt_tokens)
                    for slot, start, length, samples in rows
                    if samples
                ]
                in_flight.append(StepResult(plan.step, tuple(tokens)))
                self.steps += 1
                if scheduler.gauges().waiting:
                    self.running.append(scheduler.gauges().running)
            if plan is None or not self.depth:
                progress = scheduler.apply(in_flight.pop(0), 0.0)
                for id, token in zip(progress.sequence_ids, progress.tokens, strict=True):
                    self.told[id].append(token)
                self.ends.update((ended.id, ended.reason) for ended in progress.ended)
        scheduler.check_integrity()

    def token(self, number: int, place: int) -> int:
        return 1 if place >= self.lengths[number] - 1 else 2 + place

    @property
    def concurrency(self) -> float:
        return sum(self.running) / len(self.running)


@DEPTHS
def test_at_equal_kv_the_learned_reserve_runs_half_as_many_again_and_loses_no_token(depth: int) -> None:
    """4,096 tokens of KV, prompts of 128, max 512, outputs that end at U(1, 512)."""
    draw = random.Random(11)
    lengths = [draw.randint(1, 512) for _ in range(120)]
    runs = {}
    for reserve in ("learned", "full"):
        limits = Limits(64, 512, 16, 4096 // 16, 4096, reserve=reserve)
        runs[reserve] = run = ScriptedRun(limits, depth, lengths)
        run.run(128, 512)
        for number, length in enumerate(lengths):
            wanted = [*range(2, length + 1), 1]
            assert run.told[SequenceId(number)] == wanted, f"{reserve}: sequence {number} lost or repeated a token"
        assert set(run.ends.values()) == {EndReason.STOP}
    learned, full = runs["learned"], runs["full"]
    print(f"running {learned.concurrency:.1f} against {full.concurrency:.1f}, steps {learned.steps} to {full.steps}")
    assert learned.concurrency >= 1.5 * full.concurrency
    assert learned.steps < full.steps / 1.3, "and the work is done in fewer steps"
