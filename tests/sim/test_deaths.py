"""Parts of the engine die: everybody is answered, the engine comes back, and says so when it can not."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from fakes.engine import FakeEngine, fake_engine
from minisgl_backend.actors.internal import EngineDown
from minisgl_backend.actors.mailbox import Undeliverable
from minisgl_backend.errors import ModelUnsupported, Status
from minisgl_backend.messages.client import EngineState, Failed, Finished
from minisgl_backend.messages.engine import Ended, EndReason, Progress
from minisgl_backend.messages.plan import BatchPlan, StepResult
from minisgl_backend.scheduler.scheduler import Scheduler
from minisgl_backend.worker.fake import FakeRunner


class _DiesAt:
    """A hook that raises at the given steps, counted over all groups."""

    def __init__(self, *steps: int) -> None:
        self._steps = steps
        self._seen = 0

    async def __call__(self, plan: BatchPlan) -> None:
        self._seen += 1
        if self._seen in self._steps:
            raise RuntimeError("the device fell off the bus")


async def test_an_answer_that_was_whole_when_the_engine_died_is_told(tiny_llama: Path, overlap: bool) -> None:
    """The text actor finds its last token and the death together."""

    async def hangs(plan: BatchPlan) -> None:
        await asyncio.Event().wait()

    async with fake_engine(tiny_llama, overlap=overlap, hook=hangs) as engine:
        holder = engine.holder()
        whole, rest = holder.request("the cat", max_tokens=1), holder.request("the cat", max_tokens=1)
        while not (await holder.stats()).running:
            pass
        assert engine.text is not None
        sequence = min(engine.text._open)
        engine.inbox.post(Progress((sequence,), (30,), (Ended(sequence, EndReason.LENGTH),)))
        engine.inbox.post(EngineDown())
        assert isinstance(await holder.answer(whole), Finished)
        assert isinstance(await holder.answer(rest), Failed)


async def test_a_worker_death_answers_everybody_and_the_engine_comes_back(tiny_llama: Path, overlap: bool) -> None:
    async with fake_engine(tiny_llama, overlap=overlap, hook=_DiesAt(5)) as engine:
        holder = engine.holder()
        ids = [holder.request("the cat", max_tokens=100) for _ in range(10)]
        for id in ids:
            end = await holder.answer(id)
            assert isinstance(end, Failed) and end.status is Status.UNAVAILABLE
            assert "bus" not in end.message  # what broke is for the log
        await holder.state(EngineState.RESTARTING)
        await holder.until(lambda: holder.healths[-1].state is EngineState.READY)
        assert await holder.text(holder.request("the cat", max_tokens=5))
        stats = await holder.idle()
        assert stats.restarts == 1
        assert engine.ranks[0].closed


async def test_messages_that_come_while_a_group_dies_kill_nobody(
    tiny_llama: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a death and its announcement the way to the scheduler is closed already."""
    never = asyncio.Event()

    async def hangs_at_the_fifth(plan: BatchPlan) -> None:
        if plan.step == 5:
            await never.wait()

    async with fake_engine(tiny_llama, overlap=overlap, hook=hangs_at_the_fifth, num_pages=512) as engine:
        holder, other = engine.holder(b"holder"), engine.holder(b"other")
        ids = [holder.request("the cat", max_tokens=900) for _ in range(3)]
        gone = other.request("the cat", max_tokens=900)
        await holder.until(lambda: all(holder.outputs[id] for id in ids))

        def closed(message: object) -> None:
            raise Undeliverable("closed")

        text = engine.text
        assert text is not None and text._engine is not None
        monkeypatch.setattr(text._engine.to_scheduler, "put", closed)
        holder.cancel(ids[0])
        other.leave()
        late = holder.request("the cat", max_tokens=3)
        end = await holder.answer(ids[0])
        assert isinstance(end, Failed) and end.status is Status.CANCELLED
        engine.inbox.post(EngineDown())
        for id in (*ids[1:], late):
            end = await holder.answer(id)
            assert isinstance(end, Failed) and end.status is Status.UNAVAILABLE
        assert not other.ended(gone)


async def test_a_scheduler_death_answers_everybody_too(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    async with fake_engine(tiny_llama, overlap=overlap) as engine:
        holder = engine.holder()
        ids = [holder.request("the cat", max_tokens=100) for _ in range(4)]

        def breaks(self: Scheduler, result: StepResult, now: float) -> Progress:
            monkeypatch.undo()
            raise AssertionError("our own fault")

        monkeypatch.setattr(Scheduler, "apply", breaks)
        for id in ids:
            end = await holder.answer(id)
            assert isinstance(end, Failed) and end.status is Status.UNAVAILABLE
        await holder.until(lambda: holder.healths[-1].state is EngineState.READY)
        assert await holder.text(holder.request("the cat", max_tokens=5))
        await holder.idle()


@pytest.mark.parametrize("content", [b"\xff\xfe not utf-8", b"{", b"[]"])
async def test_a_broken_tokenizer_file_is_a_failed_start_and_never_a_dead_host(
    tmp_path: Path, tiny_llama: Path, overlap: bool, content: bytes
) -> None:
    shutil.copytree(tiny_llama, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    async with fake_engine(tmp_path, overlap=overlap, ready=False) as engine:
        holder = engine.holder()
        health = await holder.state(EngineState.FAILED)
        assert health.exit_code != 0 and health.detail


async def test_a_start_that_fails_is_not_tried_again(tiny_llama: Path, overlap: bool) -> None:
    def fails(engine: FakeEngine) -> FakeRunner:
        raise RuntimeError("no device")

    async with fake_engine(tiny_llama, overlap=overlap, build=fails, ready=False) as engine:
        health = await engine.holder().state(EngineState.FAILED)
        assert "could not start" in health.detail and "no device" in health.detail
        assert (health.exit_code, engine.backoffs) == (1, [])


async def test_back_off_doubles_and_the_engine_stays_down_after_too_many_deaths(
    tiny_llama: Path, overlap: bool
) -> None:
    starts = 0

    def works_once(engine: FakeEngine) -> FakeRunner:
        nonlocal starts
        starts += 1
        if starts > 1:
            raise RuntimeError("no device")
        return engine.runner()

    async with fake_engine(tiny_llama, overlap=overlap, hook=_DiesAt(1), build=works_once, max_restarts=4) as engine:
        holder = engine.holder()
        lost = await holder.answer(holder.request("the", max_tokens=1))
        assert isinstance(lost, Failed) and lost.status is Status.UNAVAILABLE
        health = await holder.state(EngineState.FAILED)
        assert "5 times in a row" in health.detail and "no device" in health.detail
        assert engine.backoffs == [0.0, 0.5, 1.0, 2.0]
        assert engine.gave_up
        end = await holder.answer(holder.request("the", max_tokens=1))
        assert isinstance(end, Failed) and end.status is Status.UNAVAILABLE


async def test_a_finished_request_resets_the_count_of_deaths(tiny_llama: Path, overlap: bool) -> None:
    async with fake_engine(tiny_llama, overlap=overlap, hook=_DiesAt(2, 5, 8, 11), max_restarts=1) as engine:
        holder = engine.holder()
        for _ in range(4):
            await holder.until(lambda: bool(holder.healths) and holder.healths[-1].state is EngineState.READY)
            # One step finishes the first; the next dies in the second of its steps or the first after.
            assert await holder.text(holder.request("the", max_tokens=1))
            end = await holder.answer(holder.request("the", max_tokens=50))
            assert isinstance(end, Failed) and end.status is Status.UNAVAILABLE
            seen = len(holder.healths)
            await holder.until(
                lambda seen=seen: len(holder.healths) > seen or holder.healths[-1].state is EngineState.READY
            )
        await holder.until(lambda: holder.healths[-1].state is EngineState.READY)
        assert all(health.state is not EngineState.FAILED for health in holder.healths)


@pytest.mark.parametrize("message", ["architecture 'Foo' is not supported; supported are LlamaForCausalLM"])
async def test_a_fatal_start_is_told_with_its_exit_code_and_not_tried_again(
    tiny_llama: Path, message: str, overlap: bool
) -> None:
    starts = 0

    def fails(engine: FakeEngine) -> FakeRunner:
        nonlocal starts
        starts += 1
        raise ModelUnsupported(message)

    async with fake_engine(tiny_llama, overlap=overlap, build=fails, ready=False) as engine:
        holder = engine.holder()
        health = await holder.state(EngineState.FAILED)
        assert (health.detail, health.exit_code, starts) == (message, ModelUnsupported.exit_code, 1)


async def test_a_folder_without_tokenizer_is_a_failed_start_with_one_sentence(
    tmp_path: Path, tiny_llama: Path, overlap: bool
) -> None:
    shutil.copytree(tiny_llama, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*token*"))
    async with fake_engine(tmp_path, overlap=overlap, ready=False) as engine:
        holder = engine.holder()
        health = await holder.state(EngineState.FAILED)
        assert "tokenizer" in health.detail and "\n" not in health.detail
