"""The engine dies under streams that go on in the next one: without a gap, without a repeat, and nobody for another."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fakes.engine import Holder, fake_engine
from minisgl_backend.errors import Status
from minisgl_backend.messages.client import (
    Chunk,
    EngineState,
    Failed,
    Finished,
    Output,
    PromptLogprobs,
    Request,
    Started,
)
from minisgl_backend.messages.ids import RequestId
from minisgl_backend.messages.plan import BatchPlan
from minisgl_backend.messages.tokens import count_tokens, pack_tokens

POISON_TOKENS = 77
"""Nobody else's prompt is so long."""

ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("the cat", {"max_tokens": 60, "temperature": 0}),
    ("and the hat", {"max_tokens": 30, "n": 3, "seed": 5}),
    ("a dog", {"max_tokens": 40, "logprobs": 2, "prompt_logprobs": 1}),
    ("a mouse in the house", {"max_tokens": 50, "stop": ["e"], "min_tokens": 4}),
    ("one", {"max_tokens": 1}),
    ("the end", {"max_tokens": 45, "stream": False}),
)


class _Dies:
    """Raises at the given steps, counted over all groups; and whenever a poison prompt is admitted."""

    def __init__(self, *steps: int) -> None:
        self._steps = steps
        self.seen = self.deaths = 0

    async def __call__(self, plan: BatchPlan) -> None:
        self.seen += 1
        poisoned = any(count_tokens(admission.prompt) == POISON_TOKENS for admission in plan.admissions)
        if poisoned or self.seen in self._steps:
            self.deaths += 1
            raise RuntimeError("the device fell off the bus")


def _told(outputs: list[Output]) -> dict[Any, Any]:
    """What the client got of each answer, joined; and what was told once."""
    told: dict[Any, Any] = {"started": sum(isinstance(output, Started) for output in outputs)}
    told["prompt"] = [output.logprobs for output in outputs if isinstance(output, PromptLogprobs)]
    for output in outputs:
        if isinstance(output, Chunk | Finished):
            text, tokens, logprob = told.get(output.index, ("", b"", 0.0))
            told[output.index] = (text + output.text, tokens + output.tokens, logprob + output.logprob)
    last = outputs[-1]
    told["end"] = (last.reason, last.num_input_tokens, last.num_output_tokens) if isinstance(last, Finished) else last
    return told


def _ask_all(holder: Holder) -> list[RequestId]:
    return [holder.request(text, **parameters) for text, parameters in ASKED]


async def _expected(model: Path, overlap: bool) -> list[dict[Any, Any]]:
    async with fake_engine(model, overlap=overlap) as engine:
        holder = engine.holder()
        ids = _ask_all(holder)
        for id in ids:
            await holder.answer(id)
        return [_told(holder.outputs[id]) for id in ids]


@pytest.mark.parametrize("steps", [(1,), (2,), (7, 30), (12, 45)], ids=str)
async def test_every_stream_ends_as_if_nothing_had_died(
    tiny_llama: Path, overlap: bool, steps: tuple[int, ...]
) -> None:
    """The deaths are far enough apart that no request meets two of them before its first token."""
    expected = await _expected(tiny_llama, overlap)
    dies = _Dies(*steps)
    async with fake_engine(tiny_llama, overlap=overlap, hook=dies, resume_on_restart=True) as engine:
        holder = engine.holder()
        ids = _ask_all(holder)
        for id, told in zip(ids, expected, strict=True):
            await holder.answer(id)
            assert _told(holder.outputs[id]) == told
        await holder.idle()
    assert dies.deaths == len(steps)


async def test_a_poison_request_is_tried_twice_and_takes_nobody_with_it(tiny_llama: Path, overlap: bool) -> None:
    expected = await _expected(tiny_llama, overlap)
    dies = _Dies()
    async with fake_engine(tiny_llama, overlap=overlap, hook=dies, resume_on_restart=True) as engine:
        holder = engine.holder()
        ids = _ask_all(holder)
        await holder.until(lambda: any(holder.outputs[id] for id in ids))
        poison = _ask(holder, input_ids=pack_tokens([30] * POISON_TOKENS))
        end = await holder.answer(poison)
        assert isinstance(end, Failed) and end.status is Status.INTERNAL and "twice" in end.message
        for id, told in zip(ids, expected, strict=True):
            await holder.answer(id)
            assert _told(holder.outputs[id]) == told
        await holder.idle()
    assert dies.deaths == 2


def _ask(holder: Holder, **fields: Any) -> RequestId:
    """As no helper of the holder can."""
    id = RequestId(1000)
    holder.outputs[id] = []
    holder.send(Request(id, fields.pop("text", None), b'{"max_tokens": 900}', True, None, **fields))
    return id


async def test_who_leaves_while_the_engine_is_down_is_not_resumed(tiny_llama: Path, overlap: bool) -> None:
    up = asyncio.Event()

    async def waits_when_it_comes_back(seconds: float) -> None:
        await up.wait()

    async with fake_engine(tiny_llama, overlap=overlap, hook=_Dies(6), resume_on_restart=True) as engine:
        engine.wait = waits_when_it_comes_back  # type: ignore[method-assign]
        holder, other = engine.holder(b"a"), engine.holder(b"b")
        stays, leaves = (holder.request("the cat", max_tokens=200) for _ in range(2))
        gone = other.request("the cat", max_tokens=200)
        await holder.state(EngineState.RESTARTING)
        holder.cancel(leaves)
        other.leave()
        end = await holder.answer(leaves)
        assert isinstance(end, Failed) and end.status is Status.CANCELLED
        refused = await holder.answer(holder.request("the cat", max_tokens=3))
        assert isinstance(refused, Failed) and refused.status is Status.UNAVAILABLE, "new ones may try elsewhere"
        up.set()
        assert await holder.text(stays)
        await holder.idle()
        assert not other.ended(gone)


async def test_an_engine_that_stays_down_answers_all_that_waited_for_it(tiny_llama: Path, overlap: bool) -> None:
    hook = _Dies(*range(4, 40))
    async with fake_engine(tiny_llama, overlap=overlap, hook=hook, resume_on_restart=True, max_restarts=1) as engine:
        holder = engine.holder()
        ids = [holder.request("the cat", max_tokens=300) for _ in range(5)]
        await holder.state(EngineState.FAILED)
        for id in ids:
            end = await holder.answer(id)
            assert isinstance(end, Failed) and end.status is Status.UNAVAILABLE


@pytest.mark.parametrize("n", [1, 2])
async def test_a_deadline_that_passes_while_the_engine_is_down_is_answered_then(
    tiny_llama: Path, overlap: bool, n: int
) -> None:
    up = asyncio.Event()

    async def waits_when_it_comes_back(seconds: float) -> None:
        await up.wait()

    async with fake_engine(tiny_llama, overlap=overlap, hook=_Dies(4), resume_on_restart=True) as engine:
        engine.wait = waits_when_it_comes_back  # type: ignore[method-assign]
        holder = engine.holder()
        patient = holder.request("the cat", max_tokens=20)
        late = holder.request("the cat", max_tokens=900, n=n, deadline_ms=50)
        end = await holder.answer(late)
        assert isinstance(end, Failed) and "deadline" in end.message
        assert holder.healths[-1].state is EngineState.RESTARTING and not holder.ended(patient)
        up.set()
        assert await holder.text(patient)
        await holder.idle()


class _Admitted(_Dies):
    """Keeps the lengths of the prompts that were admitted after the first death."""

    def __init__(self, *steps: int) -> None:
        super().__init__(*steps)
        self.lengths: list[int] = []

    async def __call__(self, plan: BatchPlan) -> None:
        await super().__call__(plan)
        if self.deaths:
            self.lengths += [count_tokens(admission.prompt) for admission in plan.admissions]


async def test_the_most_urgent_goes_on_first(tiny_llama: Path, overlap: bool) -> None:
    """Else it would wait behind one that nobody who comes meanwhile lets have a turn."""
    hook = _Admitted(2)
    async with fake_engine(
        tiny_llama, overlap=overlap, hook=hook, resume_on_restart=True, policy="priority", max_running=1
    ) as engine:
        holder = engine.holder()
        ids = [
            holder.request("the cat and the hat " * words, max_tokens=3, priority=priority)
            for words, priority in ((9, 5), (6, 7), (3, 1), (1, 5))
        ]
        for id in ids:
            await holder.text(id)
        order = [sorted(hook.lengths).index(length) for length in hook.lengths]
        assert order == [1, 3, 0, 2], "the shortest prompt was asked last"
