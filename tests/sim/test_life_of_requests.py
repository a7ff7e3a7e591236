"""Requests through all actors, over the fake device: right answers, one end each, nothing left behind."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from fakes.engine import fake_engine
from minisgl_backend.errors import Status
from minisgl_backend.messages.client import Chunk, Failed, Finished, FinishReason, Started
from minisgl_backend.messages.plan import BatchPlan


async def test_an_answer_is_the_same_alone_and_among_many(tiny_llama: Path, overlap: bool) -> None:
    prompts = [("the cat " * (1 + 7 * i % 23)).strip() for i in range(40)]
    async with fake_engine(tiny_llama, overlap=overlap, max_running=8, token_budget=32) as engine:
        holder = engine.holder()
        alone = []
        for prompt in prompts:
            alone.append(await holder.text(holder.request(prompt, max_tokens=12, temperature=0)))
        together = [holder.request(prompt, max_tokens=12, temperature=0) for prompt in prompts]
        assert [await holder.text(id) for id in together] == alone
        await holder.idle()


async def test_streamed_pieces_join_to_the_answer_given_at_once(tiny_llama: Path, overlap: bool) -> None:
    async with fake_engine(tiny_llama, overlap=overlap) as engine:
        holder = engine.holder()
        streamed = holder.request("and the cat", max_tokens=30)
        whole = holder.request("and the cat", stream=False, max_tokens=30)
        assert await holder.text(streamed) == await holder.text(whole)
        assert [type(output) for output in holder.outputs[whole]] == [Started, Finished]
        assert len(holder.outputs[streamed]) > 2


async def test_exactly_max_tokens_come_out_and_the_reason_is_length(tiny_llama: Path, overlap: bool) -> None:
    async with fake_engine(tiny_llama, overlap=overlap) as engine:
        holder = engine.holder()
        for number in (1, 2, 16, 17):
            end = await holder.answer(holder.request("the", stream=False, max_tokens=number))
            assert isinstance(end, Finished)
            assert (end.num_output_tokens, len(end.tokens) // 4, end.reason) == (number, number, FinishReason.LENGTH)


async def test_a_bad_request_fails_alone(tiny_llama: Path, overlap: bool) -> None:
    async with fake_engine(tiny_llama, overlap=overlap) as engine:
        holder = engine.holder()
        good = [holder.request("the cat", max_tokens=8) for _ in range(4)]
        bad = [
            holder.request("the cat", temperature="NaN"),
            holder.request("the cat", max_tokens=0),
            holder.request(b"\xff\xfe"),
            holder.request(""),
            holder.request("the cat", no_such_parameter=1),
            holder.request("the cat " * 5000),
        ]
        for id in bad:
            end = await holder.answer(id)
            assert isinstance(end, Failed)
            assert end.status in (Status.INVALID_ARGUMENT, Status.UNSUPPORTED), end
        texts = {await holder.text(id) for id in good}
        assert len(texts) == 1
        await holder.idle()


async def test_a_long_prompt_is_tokenised_beside_the_loop_and_can_be_cancelled_meanwhile(
    tiny_llama: Path, overlap: bool
) -> None:
    long = "the cat " * 2500  # 20 kB: over the bound for inline work, and far over the context after tokenising
    async with fake_engine(tiny_llama, overlap=overlap) as engine:
        holder = engine.holder()
        refused, cancelled = holder.request(long), holder.request(long)
        holder.cancel(cancelled)
        end = await holder.answer(refused)
        assert isinstance(end, Failed) and end.status is Status.INVALID_ARGUMENT and "text_input" in end.message
        end = await holder.answer(cancelled)
        assert isinstance(end, Failed)
        await holder.idle()


async def test_a_cancel_at_any_moment_ends_one_request_once_and_gives_all_pages_back(
    tiny_llama: Path, overlap: bool
) -> None:
    chance = random.Random(7)
    async with fake_engine(tiny_llama, overlap=overlap, max_running=6, token_budget=24) as engine:
        holder = engine.holder()
        reference = await holder.text(holder.request("the cat and the", max_tokens=25, temperature=0))
        for _ in range(20):
            ids = [holder.request("the cat and the", max_tokens=25, temperature=0) for _ in range(10)]
            for id in chance.sample(ids, 4):
                for _ in range(chance.randrange(40)):
                    await asyncio.sleep(0)
                holder.cancel(id)
                holder.cancel(id)
            for id in ids:
                end = await holder.answer(id)
                if isinstance(end, Finished):
                    assert await holder.text(id) == reference
                else:
                    assert end.status is Status.CANCELLED
                    sent = "".join(output.text for output in holder.outputs[id] if isinstance(output, Chunk))
                    assert reference.startswith(sent)
        await holder.idle()


async def test_cancels_of_unknown_and_ended_requests_are_harmless(tiny_llama: Path, overlap: bool) -> None:
    async with fake_engine(tiny_llama, overlap=overlap) as engine:
        holder = engine.holder()
        id = holder.request("the", max_tokens=2)
        await holder.answer(id)
        holder.cancel(id)
        holder.cancel(id + 1000)  # type: ignore[arg-type]
        assert await holder.text(holder.request("the", max_tokens=2))
        await holder.idle()


async def test_a_holder_that_is_gone_takes_only_its_own_requests_along(tiny_llama: Path, overlap: bool) -> None:
    gate = asyncio.Event()
    running = asyncio.Event()

    async def wait_for_gate(plan: BatchPlan) -> None:
        running.set()
        await gate.wait()

    async with fake_engine(tiny_llama, overlap=overlap, hook=wait_for_gate) as engine:
        stays, leaves = engine.holder(b"stays"), engine.holder(b"leaves")
        kept = stays.request("the cat", max_tokens=20)
        lost = [leaves.request("the cat", max_tokens=500) for _ in range(5)]
        await running.wait()
        leaves.leave()
        gate.set()
        assert await stays.text(kept)
        await stays.idle()
        assert not any(leaves.ended(id) for id in lost)  # nobody is there to be told


async def test_over_the_queue_limit_requests_are_refused_as_retryable(tiny_llama: Path, overlap: bool) -> None:
    gate = asyncio.Event()

    async def wait_for_gate(plan: BatchPlan) -> None:
        await gate.wait()

    async with fake_engine(tiny_llama, overlap=overlap, hook=wait_for_gate, max_running=2, queue_limit=3) as engine:
        holder = engine.holder()
        ids = [holder.request("the cat", max_tokens=4) for _ in range(8)]
        await holder.until(lambda: sum(map(holder.ended, ids)) == 3)
        gate.set()
        ends = [await holder.answer(id) for id in ids]
        assert [isinstance(end, Finished) for end in ends] == [True] * 5 + [False] * 3
        assert all(end.status is Status.UNAVAILABLE for end in ends if isinstance(end, Failed))
        await holder.idle()
