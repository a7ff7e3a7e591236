"""Rules of the actors that a running engine rests on and that no other test meets by itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fakes.engine import fake_engine
from minisgl_backend.actors.internal import Tokenised
from minisgl_backend.actors.mailbox import LocalMailbox
from minisgl_backend.actors.worker import ToWorker, WorkerActor
from minisgl_backend.errors import InvalidRequest
from minisgl_backend.messages.client import Finished, Request
from minisgl_backend.messages.control import Halt
from minisgl_backend.messages.ids import SequenceId, StepId
from minisgl_backend.messages.plan import BatchPlan, StepResult


def empty_plan(step: int) -> BatchPlan:
    return BatchPlan(StepId(step), (), (), (0,), (0,), (1,), (1,))


async def test_plans_that_wait_together_are_run_and_answered_in_their_order() -> None:
    """Depth 1 has at most one that waits; nothing in a worker may rest on that."""
    inbox: LocalMailbox[ToWorker] = LocalMailbox(8)
    answers: LocalMailbox[StepResult] = LocalMailbox(8)

    async def compute(plan: BatchPlan) -> StepResult:
        if plan.step == 1:
            for step in (2, 3, 4):
                inbox.put(empty_plan(step))
        if plan.step == 4:
            inbox.put(Halt())
        return StepResult(plan.step, (1,))

    inbox.put(empty_plan(1))
    async with asyncio.timeout(60):
        await WorkerActor(compute, inbox, answers).run()
        assert [(await answers.receive()).step for _ in range(4)] == [1, 2, 3, 4]


async def test_a_halt_that_comes_during_the_last_step_ends_the_worker() -> None:
    inbox: LocalMailbox[ToWorker] = LocalMailbox(8)

    async def compute(plan: BatchPlan) -> StepResult:
        inbox.put(Halt())
        return StepResult(plan.step, (1,))

    inbox.put(empty_plan(1))
    async with asyncio.timeout(60):
        await WorkerActor(compute, inbox, None).run()


async def test_an_id_in_use_begins_no_second_answer_and_is_free_again_after_the_end(
    tiny_llama: Path, overlap: bool
) -> None:
    gate = asyncio.Event()

    async def wait_for_gate(plan: BatchPlan) -> None:
        await gate.wait()

    async with fake_engine(tiny_llama, overlap=overlap, hook=wait_for_gate) as engine:
        holder = engine.holder()
        id = holder.request("the cat", max_tokens=6)
        again = Request(id, b"the cat", b'{"max_tokens": 2}', True, True)
        holder.send(again)
        gate.set()
        first = await holder.answer(id)
        assert isinstance(first, Finished) and first.num_output_tokens == 6
        await holder.idle()  # Holder asserts that nothing comes after a terminal answer
        holder.outputs[id] = []
        holder.send(again)
        second = await holder.answer(id)
        assert isinstance(second, Finished) and second.num_output_tokens == 2


async def test_a_prompt_that_became_tokens_after_its_request_was_cancelled_starts_nothing(
    tiny_llama: Path, overlap: bool
) -> None:
    """The message was on its way when the cancel came."""
    async with fake_engine(tiny_llama, overlap=overlap) as engine:
        holder = engine.holder()
        engine.inbox.put(Tokenised(SequenceId(1000), InvalidRequest("text_input", "too long")))
        assert await holder.text(holder.request("the cat", max_tokens=2))
        await holder.idle()


async def test_a_cancel_reaches_the_scheduler_though_the_client_has_its_answer(tiny_llama: Path, overlap: bool) -> None:
    """Else the sequence would run on for nobody until its length."""
    async with fake_engine(tiny_llama, overlap=overlap, num_pages=512) as engine:
        holder = engine.holder()
        id = holder.request("the cat", max_tokens=900)
        await holder.until(lambda: bool(holder.outputs[id]))
        holder.cancel(id)
        await holder.answer(id)
        steps = (await holder.idle()).steps
        assert steps < 400
