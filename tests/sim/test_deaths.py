"""Parts of the engine die: everybody is answered, the engine comes back, and says so when it can not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fakes.engine import FakeEngine, fake_engine
from minisgl_backend.errors import ModelUnsupported, Status
from minisgl_backend.messages.client import EngineState, Failed
from minisgl_backend.messages.plan import BatchPlan
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


async def test_a_worker_death_answers_everybody_and_the_engine_comes_back(tiny_llama: Path) -> None:
    async with fake_engine(tiny_llama, hook=_DiesAt(5)) as engine:
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


async def test_a_start_that_fails_is_not_tried_again(tiny_llama: Path) -> None:
    def fails(engine: FakeEngine) -> FakeRunner:
        raise RuntimeError("no device")

    async with fake_engine(tiny_llama, build=fails, ready=False) as engine:
        health = await engine.holder().state(EngineState.FAILED)
        assert "could not start" in health.detail and "no device" in health.detail
        assert (health.exit_code, engine.backoffs) == (1, [])


async def test_back_off_doubles_and_the_engine_stays_down_after_too_many_deaths(tiny_llama: Path) -> None:
    starts = 0

    def works_once(engine: FakeEngine) -> FakeRunner:
        nonlocal starts
        starts += 1
        if starts > 1:
            raise RuntimeError("no device")
        return engine.runner()

    async with fake_engine(tiny_llama, hook=_DiesAt(1), build=works_once, max_restarts=4) as engine:
        holder = engine.holder()
        lost = await holder.answer(holder.request("the", max_tokens=1))
        assert isinstance(lost, Failed) and lost.status is Status.UNAVAILABLE
        health = await holder.state(EngineState.FAILED)
        assert "5 times in a row" in health.detail and "no device" in health.detail
        assert engine.backoffs == [0.0, 0.5, 1.0, 2.0]
        assert engine.gave_up
        end = await holder.answer(holder.request("the", max_tokens=1))
        assert isinstance(end, Failed) and end.status is Status.UNAVAILABLE


async def test_a_finished_request_resets_the_count_of_deaths(tiny_llama: Path) -> None:
    async with fake_engine(tiny_llama, hook=_DiesAt(2, 5, 8, 11), max_restarts=1) as engine:
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
async def test_a_fatal_start_is_told_with_its_exit_code_and_not_tried_again(tiny_llama: Path, message: str) -> None:
    starts = 0

    def fails(engine: FakeEngine) -> FakeRunner:
        nonlocal starts
        starts += 1
        raise ModelUnsupported(message)

    async with fake_engine(tiny_llama, build=fails, ready=False) as engine:
        holder = engine.holder()
        health = await holder.state(EngineState.FAILED)
        assert (health.detail, health.exit_code, starts) == (message, ModelUnsupported.exit_code, 1)


async def test_a_folder_without_tokenizer_is_a_failed_start_with_one_sentence(tmp_path: Path, tiny_llama: Path) -> None:
    shutil.copytree(tiny_llama, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*token*"))
    async with fake_engine(tmp_path, ready=False) as engine:
        holder = engine.holder()
        health = await holder.state(EngineState.FAILED)
        assert "tokenizer" in health.detail and "\n" not in health.detail
