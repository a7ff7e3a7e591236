"""The worker actor on a device that answers later: the next step is launched while one is on its way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from fakes.delayed_streams import DelayedStreams
from fakes.engine import FakeEngine, fake_engine
from fakes.forward import load
from minisgl_backend.actors.mailbox import LocalMailbox
from minisgl_backend.actors.worker import Outcome, ToWorker, WorkerActor, in_place, in_thread
from minisgl_backend.attention.torch_backend import TorchAttention
from minisgl_backend.device.cpu import CpuDevice
from minisgl_backend.device.streams import Streams
from minisgl_backend.kvpool.paged import KvShape, PagedKvPool
from minisgl_backend.messages.control import Halt
from minisgl_backend.messages.ids import StepId
from minisgl_backend.messages.plan import BatchPlan, StepResult
from minisgl_backend.models.model import Model
from minisgl_backend.sampling.grammar import GrammarSlots
from minisgl_backend.worker.runner import Launched
from minisgl_backend.worker.torch_runner import TorchRunner, attention_variants


def plan_of(step: int) -> BatchPlan:
    return BatchPlan(StepId(step), (), (), (0,), (0,), (1,), (1,))


def result_of(step: int) -> StepResult:
    return StepResult(StepId(step), (step,))


class Device:
    """Steps end when the test says so. `at_once`: steps whose result the launch itself brings."""

    def __init__(self, *at_once: int) -> None:
        self.inbox: LocalMailbox[ToWorker] = LocalMailbox(16)
        self.answers: LocalMailbox[StepResult] = LocalMailbox(16)
        self.launched: LocalMailbox[int] = LocalMailbox(16)
        self.steps: dict[int, asyncio.Future[StepResult]] = {}
        self.run: asyncio.Task[None] | None = None
        self._at_once = at_once

    async def compute(self, plan: BatchPlan) -> Outcome:
        self.launched.put(plan.step)
        if plan.step in self._at_once:
            return result_of(plan.step)
        self.steps[plan.step] = asyncio.get_running_loop().create_future()
        return self.steps[plan.step]

    def plan(self, *steps: int) -> None:
        for step in steps:
            self.inbox.put(plan_of(step))

    def end(self, step: int) -> None:
        self.steps[step].set_result(result_of(step))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.run = asyncio.create_task(WorkerActor(self.compute, self.inbox, self.answers).run())
        try:
            async with asyncio.timeout(60):
                yield
        finally:
            self.run.cancel()
            await asyncio.gather(self.run, return_exceptions=True)


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_the_next_step_is_launched_while_one_is_on_its_way_and_no_third() -> None:
    device = Device()
    async with device.running():
        device.plan(1)
        assert await device.launched.receive() == 1
        device.plan(2, 3)
        assert await device.launched.receive() == 2
        await settled()
        assert device.launched.receive_nowait() is None and device.answers.receive_nowait() is None
        device.end(1)
        assert (await device.answers.receive()).step == 1
        assert await device.launched.receive() == 3


async def test_an_answer_goes_out_when_its_step_ends_though_no_plan_comes() -> None:
    device = Device()
    async with device.running():
        device.plan(1)
        assert await device.launched.receive() == 1
        await settled()
        device.end(1)
        assert (await device.answers.receive()).step == 1
        device.plan(2)
        assert await device.launched.receive() == 2, "the message it waited for meanwhile is not lost"


async def test_answers_keep_the_order_of_the_steps_also_when_a_later_one_fails_at_once() -> None:
    device = Device(2, 4)
    async with device.running():
        device.plan(1, 2, 3, 4)
        assert [await device.launched.receive() for _ in range(2)] == [1, 2]
        await settled()
        assert device.answers.receive_nowait() is None, "step 2 has its result, step 1 has not"
        device.end(1)
        assert [(await device.answers.receive()).step for _ in range(2)] == [1, 2]
        assert [await device.launched.receive() for _ in range(2)] == [3, 4]
        device.end(3)
        assert [(await device.answers.receive()).step for _ in range(2)] == [3, 4]


async def test_a_halt_does_not_wait_for_steps_on_their_way() -> None:
    device = Device()
    async with device.running():
        device.plan(1, 2)
        assert [await device.launched.receive() for _ in range(2)] == [1, 2]
        device.inbox.put(Halt())
        assert device.run is not None
        await device.run
        assert device.answers.receive_nowait() is None


async def test_a_step_that_breaks_on_the_device_ends_the_actor() -> None:
    device = Device()
    async with device.running():
        device.plan(1)
        assert await device.launched.receive() == 1
        device.steps[1].set_exception(RuntimeError("the device fell off the bus"))
        assert device.run is not None
        with pytest.raises(RuntimeError, match="fell off the bus"):
            await device.run


class _Slow:
    """See Pending."""

    def __init__(self, step: int, gate: threading.Event) -> None:
        self._step, self._gate = step, gate

    def result(self) -> StepResult:
        assert self._gate.wait(60)
        return result_of(self._step)


@pytest.mark.parametrize("where", [in_place, in_thread])
async def test_a_thread_waits_for_what_a_runner_has_launched(where: object) -> None:
    gate = threading.Event()

    def launch(plan: BatchPlan) -> Launched:
        return _Slow(plan.step, gate) if plan.step == 1 else result_of(plan.step)

    compute = in_place(launch) if where is in_place else in_thread(launch)
    async with asyncio.timeout(60):
        first, second = await compute(plan_of(1)), await compute(plan_of(2))
        assert not isinstance(first, StepResult) and not first.done() and second == result_of(2)
        gate.set()
        assert await first == result_of(1)


class LateDevice(CpuDevice):
    """A CPU with the queues of a device that does nothing until it is waited for."""

    def __init__(self) -> None:
        super().__init__(1)
        self.delayed = DelayedStreams()
        self.streams: Streams = self.delayed


def torch_runner(engine: FakeEngine, model: Model, device: CpuDevice) -> TorchRunner:
    """Of a whole engine, over a small model in fp32."""
    config, spec = engine.config, model.spec
    shape = KvShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, torch.float32)
    pool = PagedKvPool(shape, 64, config.page_size, device.torch_device)
    runner = TorchRunner(
        model,
        device,
        pool,
        attention=TorchAttention(pool, attention_variants(spec)),
        max_running=config.max_running,
        context_tokens=1024,
        token_budget=config.token_budget,
        grammars=GrammarSlots(tuple, spec.vocab_size),
    )
    runner.warm_up()
    return runner


async def answers_of(tiny_llama: Path, device: CpuDevice, *, overlap: bool) -> list[str]:
    """Of ten requests at once, in a pool that is too small for them."""
    model = load(tiny_llama, context_tokens=1024)
    settings = {"overlap": overlap, "max_running": 6, "token_budget": 64}
    async with fake_engine(tiny_llama, build=lambda engine: torch_runner(engine, model, device), **settings) as engine:
        holder = engine.holder()
        ids = []
        for number in range(10):
            prompt = "the cat and a thing of the " * (1 + 5 * (number % 3))
            ids.append(holder.request(prompt, max_tokens=40, temperature=number % 2, seed=number))
        answers = [await holder.text(id) for id in ids]
        await holder.idle()
        engine.schedulers[-1].check_integrity()
    return answers


async def test_an_engine_on_a_device_that_answers_late_gives_the_answers_of_one_that_does_one_thing_after_another(
    tiny_llama: Path,
) -> None:
    late = LateDevice()
    expected = await answers_of(tiny_llama, CpuDevice(1), overlap=False)
    assert await answers_of(tiny_llama, late, overlap=True) == expected
    assert len(set(expected)) > 5
