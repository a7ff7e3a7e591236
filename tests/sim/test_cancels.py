"""Random cancels in the whole running engine at depth 1: nothing leaks, and nobody else's answer changes.

Text actor, supervisor, scheduler and worker are the real ones, over a small pool, so that sequences wait and share
pages. `make fuzz` cancels 10,000 requests; MINISGL_CANCELS says another number.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fakes.engine import FakeEngine, Holder, fake_engine
from minisgl_backend.errors import Status
from minisgl_backend.messages.client import Chunk, Failed, Finished
from minisgl_backend.messages.ids import RequestId
from minisgl_backend.messages.plan import BatchPlan
from minisgl_backend.messages.tokens import unpack_tokens
from minisgl_backend.scheduler.sequence import SequenceState
from minisgl_backend.text.record import Record

CANCELS = int(os.environ.get("MINISGL_CANCELS", "400"))  # in a window
WINDOWS = 10  # caches, free lists and rings of rates fill in the first ones; what leaks grows in each
"""Cancels of requests that have no answer yet."""

PROMPTS = ("the cat", "the cat and the", "the cat and the thing", "a thing of the cat", "in the")
LONG = "the cat " * 2500  # refused: no pool of this size holds it
TOGETHER = 12
SETTINGS: dict[str, Any] = {"max_running": 6, "token_budget": 24, "page_size": 4, "num_pages": 15}


@dataclass(frozen=True)
class Case:
    """A request, and what it is answered at depth 0. None: it is refused."""

    text: str
    parameters: dict[str, Any]
    answer: tuple[str, bytes, str] | None


async def cases_of(model: Path) -> list[Case]:
    """Each prompt with several lengths and ends, asked one after another at depth 0."""
    cases = [Case(LONG, {}, None)]
    async with fake_engine(model, overlap=False, **SETTINGS) as engine:
        holder = engine.holder()
        for text in PROMPTS:
            for max_tokens in (1, 2, 9, 25):
                id = holder.request(text, max_tokens=max_tokens)
                await holder.answer(id)
                cases.append(Case(text, {"max_tokens": max_tokens}, answer_of(holder, id)))
            tokens = unpack_tokens(answer_of(holder, id)[1])
            for place in (0, 3, 11):  # a stop token: at depth 1 the next row is under way when it comes
                parameters = {"max_tokens": 25, "stop_token_ids": [tokens[place]]}
                id = holder.request(text, **parameters)
                await holder.answer(id)
                cases.append(Case(text, parameters, answer_of(holder, id)))
    return cases


def answer_of(holder: Holder, id: RequestId) -> tuple[str, bytes, str]:
    """Text, tokens and reason of an answer that ended well."""
    parts = [output for output in holder.outputs[id] if isinstance(output, Chunk | Finished)]
    assert isinstance(parts[-1], Finished), holder.outputs[id]
    return "".join(part.text for part in parts), b"".join(part.tokens for part in parts), parts[-1].reason.value


def check(holder: Holder, id: RequestId, case: Case, cancelled: bool) -> None:
    """The answer of depth 0; of a cancelled request that, or a part of it and the end that was asked for."""
    end = holder.outputs[id][-1]
    if isinstance(end, Finished):
        assert answer_of(holder, id) == case.answer
    elif case.answer is None:
        assert isinstance(end, Failed) and (end.status is Status.INVALID_ARGUMENT or cancelled), end
    else:
        assert isinstance(end, Failed) and cancelled and end.status is Status.CANCELLED, end
        sent = b"".join(output.tokens for output in holder.outputs[id] if isinstance(output, Chunk))
        assert case.answer[1].startswith(sent)


async def a_wave(holder: Holder, cases: list[Case], chance: random.Random) -> int:
    """Some requests at once, most of them cancelled at some moment, then all of their answers. Returns the cancels."""
    asked: dict[RequestId, Case] = {}
    cancelled: list[RequestId] = []
    for _ in range(TOGETHER):
        case = cases[0] if chance.random() < 0.02 else chance.choice(cases[1:])
        asked[holder.request(case.text, **case.parameters)] = case
        await turns(chance.randrange(8))
        open_ones = [id for id in asked if not holder.ended(id)]
        if open_ones and chance.random() < 0.8:
            cancelled.append(chance.choice(open_ones))
            holder.cancel(cancelled[-1])
    for id, case in asked.items():
        await holder.answer(id)
        check(holder, id, case, id in cancelled)
        del holder.outputs[id]
    return len(set(cancelled))


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def at_rest(engine: FakeEngine, holder: Holder) -> int:
    """Asserts that nobody holds anything, actor by actor; returns how many blocks of memory this process has."""
    await holder.idle()
    await turns(5)
    scheduler, text = engine.schedulers[-1], engine.text
    scheduler.check_integrity()
    gauges = scheduler.gauges()
    assert not scheduler.in_flight and (gauges.waiting, gauges.running) == (0, 0)
    assert gauges.free_slots == gauges.total_slots
    assert gauges.free_pages + gauges.cached_pages == gauges.total_pages
    assert gauges.evictable_pages == gauges.cached_pages, "pages are locked by nobody"
    assert text is not None
    assert not (text._open or text._by_request or text._touched or text._behind or text._outputs), (
        "the text actor keeps requests"
    )
    assert engine.inbox.receive_nowait() is None
    gc.collect()
    alive = [one for one in gc.get_objects() if type(one) in (Record, SequenceState)]  # isinstance wakes lazy modules
    assert not alive, f"{len(alive)} records and sequences of ended requests live on"
    return sys.getallocatedblocks()


async def test_random_cancels_leak_nothing_and_all_other_answers_are_those_of_depth_0(tiny_llama: Path) -> None:
    chance = random.Random(11)
    cases = await cases_of(tiny_llama)

    async def takes_a_while(plan: BatchPlan) -> None:
        await turns(chance.randrange(6))

    async with fake_engine(
        tiny_llama, overlap=True, hook=takes_a_while, patience_s=300 + CANCELS / 2, **SETTINGS
    ) as engine:
        holder = engine.holder()
        grown: list[int] = []  # blocks of memory in each window
        while len(grown) < WINDOWS and (len(grown) < 2 or min(grown) >= CANCELS // 4):
            before = await at_rest(engine, holder)
            cancels = 0
            while cancels < CANCELS:
                cancels += await a_wave(holder, cases, chance)
            grown.append(await at_rest(engine, holder) - before)
        stats = await holder.stats()
    print(f"{CANCELS} cancels a window, {stats.steps} steps, {stats.retractions} retractions, blocks more: {grown}")
    assert (stats.restarts, len(engine.schedulers)) == (0, 1)
    assert min(grown) < CANCELS // 4, f"in every window of {CANCELS} cancels blocks of memory stay: {grown}"
