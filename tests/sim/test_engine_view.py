"""The operation `engine` through all actors: true, cheap for the scheduler, silent about prompts, never in the way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fakes.engine import FakeEngine, fake_engine
from minisgl_backend.actors import engine_view
from minisgl_backend.errors import Status
from minisgl_backend.messages.client import EngineState, Failed
from minisgl_backend.messages.engine import Look
from minisgl_backend.messages.plan import BatchPlan


@pytest.fixture
def always_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question gets a snapshot of its own."""
    monkeypatch.setattr(engine_view, "KEPT_S", 0.0)


class Gate:
    """Steps run while it is open."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def hook(self, plan: BatchPlan) -> None:
        await self.open.wait()


def looks_of(engine: FakeEngine) -> list[Look]:
    """What the scheduler is asked for from now on."""
    looks: list[Look] = []
    scheduler = engine.schedulers[-1]
    view = scheduler.view

    def counted(look: Look, now: float) -> Any:
        looks.append(look)
        return view(look, now)

    scheduler.view = counted  # type: ignore[method-assign]
    return looks


def adds_up(pages: dict[str, int]) -> bool:
    return pages["total"] == sum(count for owner, count in pages.items() if owner != "total")


async def test_it_tells_of_rows_pages_and_tree_while_they_run(
    tiny_llama: Path, overlap: bool, always_new: None
) -> None:
    async with fake_engine(tiny_llama, overlap=overlap, max_running=2) as engine:
        holder = engine.holder()
        await holder.text(holder.request("the cat " * 20, max_tokens=8))
        running = [holder.request("the cat " * 20 + end, max_tokens=300) for end in ("and", "or")]
        waiting = holder.request("the dog", max_tokens=7)
        await holder.until(lambda: all(len(holder.outputs[id]) > 20 for id in running))
        told = await holder.result(holder.ask("engine"))
        assert told["state"] == "ready" and told["steps"] > 20 and adds_up(told["pages"])
        assert [(row["phase"], row["max_tokens"]) for row in told["running"]] == [("decode", 300)] * 2
        assert all(row["output_tokens"] >= 20 and row["cached_tokens"] > 0 for row in told["running"])
        assert [row["prompt_tokens"] for row in told["waiting"]] == [5] and told["slots"] == {"total": 2, "free": 0}
        assert all(row["age_s"] >= 0 for row in told["running"] + told["waiting"])
        assert told["tokens_per_s"] > 0 and told["ttft_ms"]["p50"] > 0 and told["itl_ms"]["p99"] > 0
        assert 0 < told["cache"]["hit_tokens"] < told["cache"]["prompt_tokens"]
        assert told["pages"]["tree_locked"] > 0 and told["tree"][0]["locks"] == 2
        numbers = [node["id"] for node in told["tree"]]
        assert all(node["parent"] is None or node["parent"] in numbers for node in told["tree"])
        assert told["left_out"] == {"running": 0, "waiting": 0, "tree": 0}
        for id in (*running, waiting):
            holder.cancel(id)
        await holder.idle()


async def test_texts_are_told_only_where_the_setting_allows(tiny_llama: Path, overlap: bool) -> None:
    for allowed in (False, True):
        async with fake_engine(tiny_llama, overlap=overlap, show_prompts_in_engine_view=allowed) as engine:
            holder, looks = engine.holder(), looks_of(engine)
            await holder.text(holder.request("the secret cat " * 9, max_tokens=8))
            told = await holder.result(holder.ask("engine"))
            texts = [node["text"] for node in told["tree"]]
            assert told["shows_prompts"] is allowed and len(texts) == 1
            assert texts[0].startswith("the secret cat the") if allowed else texts == [None]
            assert allowed or "cat" not in str(told)
            assert [look.edge_tokens > 0 for look in looks] == [allowed]


async def test_many_who_ask_share_one_look_at_the_scheduler(
    tiny_llama: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_view, "KEPT_S", 3600.0)
    async with fake_engine(tiny_llama, overlap=overlap) as engine:
        looks = looks_of(engine)
        holders = [engine.holder(b"viewer-%d" % number) for number in range(20)]
        asked = [(holder, holder.ask("engine")) for holder in holders for _ in range(10)]
        told = [await holder.result(id) for holder, id in asked]
        told.append(await holders[0].result(holders[0].ask("engine")))
        assert len(looks) == 1 and all(one == told[0] for one in told)
        monkeypatch.setattr(engine_view, "KEPT_S", 0.0)
        await holders[0].result(holders[0].ask("engine"))
        assert len(looks) == 2, "it is not kept for ever"


async def test_it_is_answered_when_the_queue_is_full_and_while_a_step_runs(tiny_llama: Path, overlap: bool) -> None:
    gate = Gate()
    async with fake_engine(tiny_llama, overlap=overlap, max_running=1, queue_limit=1, hook=gate.hook) as engine:
        holder = engine.holder()
        open_ = [holder.request("the cat", max_tokens=4) for _ in range(2)]
        refused = await holder.answer(holder.request("the cat", max_tokens=4))
        assert isinstance(refused, Failed) and "queue is full" in refused.message
        told = await holder.result(holder.ask("engine"))
        assert (len(told["running"]), len(told["waiting"])) == (1, 1)
        gate.open.set()
        for id in open_:
            await holder.text(id)
        await holder.idle()


async def test_lists_are_cut_and_say_what_they_leave_out(
    tiny_llama: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_view, "MOST_ROWS", 2)
    monkeypatch.setattr(engine_view, "MOST_NODES", 1)
    gate = Gate()
    gate.open.set()
    async with fake_engine(tiny_llama, overlap=overlap, max_running=3, hook=gate.hook) as engine:
        holder = engine.holder()
        for text in ("the cat " * 9, "the dog " * 9):
            await holder.text(holder.request(text, max_tokens=1))
        gate.open.clear()
        open_ = [holder.request("the", max_tokens=4) for _ in range(8)]
        while (await holder.stats()).waiting < 5:
            pass
        told = await holder.result(holder.ask("engine"))
        assert (len(told["running"]), len(told["waiting"]), len(told["tree"])) == (2, 2, 1)
        assert told["left_out"] == {"running": 1, "waiting": 3, "tree": 1}
        gate.open.set()
        for id in open_:
            await holder.text(id)


async def test_an_engine_that_is_down_tells_its_state(tiny_llama: Path, overlap: bool) -> None:
    def broken(engine: FakeEngine) -> Any:
        raise RuntimeError("no such device")

    async with fake_engine(tiny_llama, overlap=overlap, build=broken, ready=False) as engine:
        holder = engine.holder()
        await holder.state(EngineState.FAILED)
        told = await holder.result(holder.ask("engine"))
        assert told["state"] == "failed" and told["running"] == [] and told["pages"]["total"] == 0


async def test_who_waits_for_a_view_may_leave_and_learns_of_a_death(tiny_llama: Path, overlap: bool) -> None:
    die = asyncio.Event()

    async def hook(plan: BatchPlan) -> None:
        await die.wait()
        die.clear()
        raise RuntimeError("the device is lost")

    async with fake_engine(tiny_llama, overlap=overlap, hook=hook) as engine:
        holder = engine.holder()
        engine.schedulers[-1].view = lambda look, now: None  # type: ignore[method-assign, assignment, return-value]
        left, stays = holder.ask("engine"), holder.ask("engine")
        holder.cancel(left)
        assert (await holder.answer(left)).status is Status.CANCELLED  # type: ignore[union-attr]
        victim = holder.request("the cat", max_tokens=4)
        die.set()
        for id in (victim, stays):
            assert (await holder.answer(id)).status is Status.UNAVAILABLE  # type: ignore[union-attr]
        await holder.until(lambda: holder.healths[-1].state is EngineState.READY)
        assert (await holder.result(holder.ask("engine")))["state"] == "ready"
