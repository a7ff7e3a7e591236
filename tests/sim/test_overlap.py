"""The next step is planned while one runs: in the running engine, that is the actors with their mailboxes."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

from fakes.actor_pair import ActorPair
from fakes.engine import FakeEngine, fake_engine
from fakes.virtual_time import VirtualTimeLoop, run_virtually
from minisgl_backend.actors.mailbox import LocalMailbox
from minisgl_backend.actors.worker import ToWorker, WorkerActor
from minisgl_backend.messages.client import EngineState, Failed, Finished, FinishReason
from minisgl_backend.messages.control import Halt
from minisgl_backend.messages.engine import EndReason, Sequence
from minisgl_backend.messages.ids import SequenceId, StepId
from minisgl_backend.messages.plan import BatchPlan, StepResult
from minisgl_backend.messages.sampling import Sampling
from minisgl_backend.messages.tokens import pack_tokens, unpack_tokens
from minisgl_backend.scheduler.limits import Limits
from minisgl_backend.worker.fake import FakeRunner
from minisgl_backend.worker.spoilt import SpoiltSlots

LIVES = int(os.environ.get("MINISGL_CANCELS", "600"))
"""Sequences of the test with random cancels, most of which are cancelled."""

STEP_S = 0.005


def sequence(id: int, chance: random.Random, **given: int) -> Sequence:
    prompt = [7] * chance.choice((0, 4, 8, 9)) + [chance.randrange(3) for _ in range(chance.randrange(1, 12))]
    sampling = Sampling(temperature=1.0, top_k=0, top_p=1.0, seed=chance.randrange(4), sample_index=0)
    stops = (chance.randrange(23),) if chance.random() < 0.5 else ()
    return Sequence(SequenceId(id), pack_tokens(prompt), sampling, given.get("tokens", chance.randrange(1, 30)), stops)


async def test_hundreds_of_cancels_and_failed_steps_leak_nothing_and_change_no_answer(overlap: bool) -> None:
    """A small pool, so that sequences are retracted too. Every plan is checked against all that is not yet applied."""
    chance = random.Random(5)
    limits = Limits(max_running=6, token_budget=24, page_size=4, num_pages=30, context_tokens=64)

    async def device() -> bool:
        await turns(chance.randrange(6))
        return chance.random() > 0.01

    pair = ActorPair(limits, overlap=overlap, device=device)
    async with asyncio.timeout(120 + LIVES / 10), pair.running():
        for id in range(1, LIVES + 1):
            pair.submit(sequence(id, chance))
            await turns(chance.randrange(12))
            if chance.random() < 0.6:
                cancelled = SequenceId(chance.randrange(max(1, id - 8), id + 1))
                pair.abort(cancelled)
                pair.abort(cancelled)
        await pair.idle()
    pair.check_all_came_back()
    ends = [life.ended for life in pair.lives.values()]
    assert ends.count(EndReason.ABORT) >= LIVES // 3
    assert min(ends.count(EndReason.STOP), ends.count(EndReason.LENGTH)) >= LIVES // 20
    for life in pair.lives.values():
        if life.ended is not EndReason.FAILED:  # it was alone in a step that failed
            life.check()


async def test_no_step_is_planned_beyond_max_tokens(overlap: bool) -> None:
    """What it brought would be dropped: only its cost shows."""

    async def device() -> bool:
        await turns(5)
        return True

    pair = ActorPair(Limits(4, 64, 16, 64, 512), overlap=overlap, device=device)
    async with asyncio.timeout(60), pair.running():
        pair.submit(Sequence(SequenceId(1), pack_tokens([1, 2, 3]), Sampling(1.0, 0, 1.0, 1, 0), 20, ()))
        await pair.idle()
    assert len(pair.lives[SequenceId(1)].tokens) == pair.scheduler.gauges().steps == 20


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def steps_of(loop: VirtualTimeLoop, *, overlap: bool) -> float:
    """Seconds that a stream of 200 tokens takes when device and host need STEP_S for each."""

    async def device() -> bool:
        await asyncio.sleep(STEP_S)
        return True

    async def main() -> float:
        limits = Limits(max_running=4, token_budget=64, page_size=16, num_pages=64, context_tokens=512)
        pair = ActorPair(limits, overlap=overlap, device=device, host_work=lambda: loop.work(STEP_S))
        async with pair.running():
            stream = Sequence(SequenceId(1), pack_tokens([1, 2, 3]), Sampling(1.0, 0, 1.0, 1, 0), 200, ())
            pair.submit(stream)
            await pair.idle()
        pair.lives[stream.id].check()
        return loop.time()

    return float(run_virtually(loop, main()))


def test_with_host_time_equal_to_device_time_overlap_gives_1_8_times_the_throughput() -> None:
    alone, overlapped = (steps_of(VirtualTimeLoop(), overlap=overlap) for overlap in (False, True))
    assert alone == pytest.approx(200 * 2 * STEP_S, rel=0.02)
    assert alone / overlapped >= 1.8


async def test_a_stop_token_ends_the_answer_though_the_next_step_is_under_way(tiny_llama: Path, overlap: bool) -> None:
    async with fake_engine(tiny_llama, overlap=overlap) as engine:
        holder = engine.holder()
        whole = await holder.answer(holder.request("the cat", stream=False, max_tokens=30))
        assert isinstance(whole, Finished)
        tokens = list(unpack_tokens(whole.tokens))
        for place in (0, 1, 17, 29):
            first = tokens.index(tokens[place])
            id = holder.request("the cat", stream=False, max_tokens=30, stop_token_ids=[tokens[place]])
            end = await holder.answer(id)
            assert isinstance(end, Finished) and end.reason is FinishReason.STOP
            assert list(unpack_tokens(end.tokens)) == tokens[: first + 1]
        await holder.idle()
        engine.schedulers[-1].check_integrity()


class _RunsOutOfMemory(FakeRunner):
    """At the given steps; answers the plans made before that was known as the real runner does."""

    def __init__(self, engine: FakeEngine, *steps: int) -> None:
        super().__init__(engine.config, num_pages=64, vocabulary=range(20, 300))
        self._steps = steps
        self._spoilt = SpoiltSlots(engine.config.max_running)
        self.void_steps: list[int] = []

    def run(self, plan: BatchPlan) -> StepResult:
        answer = self._spoilt.void(plan)
        if answer is not None:
            self.void_steps.append(plan.step)
        elif plan.step in self._steps:
            answer = self._spoilt.failed(plan, "out of memory")
        if answer is None:
            return super().run(plan)
        self._last_step = plan.step
        return answer


async def test_a_step_that_runs_out_of_memory_voids_the_one_behind_it_and_costs_no_token(
    tiny_llama: Path, overlap: bool
) -> None:
    prompts = ["the cat", "and the cat", "a thing of the"]
    runners: list[_RunsOutOfMemory] = []

    def build(engine: FakeEngine) -> FakeRunner:
        runners.append(_RunsOutOfMemory(engine, 14, 15, 16, 40))
        return runners[-1]

    async def slow(plan: BatchPlan) -> None:
        await turns(20)

    async with fake_engine(tiny_llama, overlap=overlap) as sound:
        holder = sound.holder()
        expected = [await holder.text(holder.request(prompt, max_tokens=40)) for prompt in prompts]
    async with fake_engine(tiny_llama, overlap=overlap, build=build, hook=slow) as engine:
        holder = engine.holder()
        ids = [holder.request(prompt, max_tokens=40) for prompt in prompts]
        assert [await holder.text(id) for id in ids] == expected
        assert (await holder.idle()).restarts == 0
        engine.schedulers[-1].check_integrity()
    assert bool(runners[0].void_steps) == overlap


async def test_requests_in_flight_are_answered_when_the_group_dies_between_two_plans(tiny_llama: Path) -> None:
    """The worker has the next plan already when its step breaks."""

    async def breaks(plan: BatchPlan) -> None:
        await turns(20)
        if plan.step == 7:
            raise RuntimeError("the device fell off the bus")

    async with fake_engine(tiny_llama, overlap=True, hook=breaks) as engine:
        holder = engine.holder()
        end = await holder.answer(holder.request("the cat", max_tokens=50))
        assert isinstance(end, Failed)
        await holder.until(lambda: holder.healths[-1].state is EngineState.READY)
        assert await holder.text(holder.request("the cat", max_tokens=3))
        assert len(engine.schedulers) == 2
        await holder.idle()


async def test_a_halt_goes_before_the_plan_that_waits() -> None:
    inbox: LocalMailbox[ToWorker] = LocalMailbox(8)

    async def compute(plan: BatchPlan) -> StepResult:
        assert plan.step == 1, "a plan runs after the Halt"
        inbox.put(BatchPlan(StepId(plan.step + 1), (), (), (0,), (0,), (1,), (1,)))
        inbox.put(Halt())
        return StepResult(plan.step, (1,))

    inbox.put(BatchPlan(StepId(1), (), (), (0,), (0,), (1,), (1,)))
    async with asyncio.timeout(60):
        await WorkerActor(compute, inbox, None).run()
