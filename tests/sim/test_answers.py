"""Several answers, stop strings and logprobs through all actors, over the fake device."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from fakes.engine import FakeEngine, fake_engine
from minisgl_backend.errors import Status
from minisgl_backend.messages.client import (
    Chunk,
    EngineState,
    Failed,
    Finished,
    FinishReason,
    PromptLogprobs,
    Started,
)
from minisgl_backend.messages.plan import BatchPlan
from minisgl_backend.messages.tokens import unpack_tokens
from minisgl_backend.text import prompt_logprobs


def pieces(outputs: list[object], index: int) -> list[Chunk | Finished]:
    return [output for output in outputs if isinstance(output, Chunk | Finished) and output.index == index]


async def test_n_answers_are_n_sequences_with_one_end(tiny_llama: Path, overlap: bool) -> None:
    async with fake_engine(tiny_llama, overlap=overlap, max_running=8) as engine:
        holder = engine.holder()
        one = await holder.text(holder.request("the cat", max_tokens=9))
        for stream in (True, False):
            id = holder.request("the cat", stream=stream, max_tokens=9, n=3)
            end = await holder.answer(id)
            assert isinstance(end, Finished) and end.num_output_tokens == 27
            outputs = holder.outputs[id]
            started = [output for output in outputs if isinstance(output, Started)]
            assert [start.num_samples for start in started] == [3]
            for index in range(3):  # the fake device draws alike for all
                mine = pieces(list(outputs), index)
                assert "".join(piece.text for piece in mine) == one
                assert [piece.reason for piece in mine if piece.reason] == [FinishReason.LENGTH]
                assert len(mine) == 1 or stream
        await holder.idle()


async def test_a_cancel_ends_all_answers_of_a_request(tiny_llama: Path, overlap: bool) -> None:
    async with fake_engine(tiny_llama, overlap=overlap, max_running=8) as engine:
        holder = engine.holder()
        id = holder.request("the cat", max_tokens=900, n=4)
        await holder.until(lambda: any(isinstance(output, Chunk) for output in holder.outputs[id]))
        holder.cancel(id)
        end = await holder.answer(id)
        assert isinstance(end, Failed) and end.status is Status.CANCELLED
        await holder.idle()


async def test_the_queues_limit_counts_answers(tiny_llama: Path) -> None:
    gate = asyncio.Event()

    async def wait(plan: BatchPlan) -> None:
        await gate.wait()

    async with fake_engine(tiny_llama, max_running=2, queue_limit=4, hook=wait) as engine:
        holder = engine.holder()
        assert (await _refusal(engine, n=7)) == (Status.INVALID_ARGUMENT, "n: must be at most 6")
        first = holder.request("the cat", max_tokens=2, n=4)
        assert (await _refusal(engine, n=3)) == (Status.UNAVAILABLE, "the queue is full; try again later")
        second = holder.request("the cat", max_tokens=2, n=2)
        assert (await _refusal(engine)) == (Status.UNAVAILABLE, "the queue is full; try again later")
        assert (await holder.stats()).open_requests == 2
        gate.set()
        for id, n in ((first, 4), (second, 2)):
            end = await holder.answer(id)
            assert isinstance(end, Finished) and end.num_output_tokens == 2 * n
        await holder.idle()


async def _refusal(engine: FakeEngine, **parameters: int) -> tuple[Status, str]:
    holder = engine.holder(b"other")
    end = await holder.answer(holder.request("the cat", **parameters))
    assert isinstance(end, Failed)
    return end.status, end.message.split(",")[0]


async def test_a_stop_string_ends_the_work_too_and_the_answer_is_cut_at_it(tiny_llama: Path, overlap: bool) -> None:
    async with fake_engine(tiny_llama, overlap=overlap) as engine:
        holder = engine.holder()
        whole = await holder.text(holder.request("the cat", max_tokens=40))
        stop = whole[len(whole) // 2 :][:3]
        place = whole.index(stop)
        for stream in (True, False):
            for include in (True, False):
                id = holder.request(
                    "the cat", stream=stream, max_tokens=900, stop=stop, include_stop_str_in_output=include
                )
                assert await holder.text(id) == whole[: place + 3 * include]
                end = await holder.answer(id)
                assert isinstance(end, Finished) and end.reason is FinishReason.STOP
                tokens = [
                    token
                    for output in holder.outputs[id]
                    if isinstance(output, Chunk | Finished)
                    for token in unpack_tokens(output.tokens)
                ]
                assert len(tokens) == end.num_output_tokens < 45
        await holder.idle()  # long before 900 tokens: the scheduler was told


async def test_of_several_answers_one_may_stop_and_the_others_go_on(tiny_llama: Path, overlap: bool) -> None:
    async with fake_engine(tiny_llama, overlap=overlap) as engine:
        holder = engine.holder()
        whole = await holder.text(holder.request("the cat", max_tokens=20))
        end = await holder.answer(holder.request("the cat", stream=False, n=2, max_tokens=20, stop=[whole[3:6]]))
        assert isinstance(end, Finished) and end.reason is FinishReason.STOP
        await holder.idle()


async def test_logprobs_come_with_their_tokens_and_those_of_the_prompt_once(tiny_llama: Path, overlap: bool) -> None:
    async with fake_engine(tiny_llama, overlap=overlap, token_budget=88) as engine:
        holder = engine.holder()
        prompt = "the cat " * 40
        id = holder.request(prompt, max_tokens=5, logprobs=2, prompt_logprobs=1, n=2, return_token_ids=True)
        end = await holder.answer(id)
        assert isinstance(end, Finished), end
        outputs = holder.outputs[id]
        (start,) = [output for output in outputs if isinstance(output, Started)]
        prompt_ids = list(unpack_tokens(start.prompt_ids))
        told = [json.loads(output.logprobs) for output in outputs if type(output).__name__ == "PromptLogprobs"]
        assert len(told) == 1 and told[0][0] is None
        assert [next(iter(entry)) for entry in told[0][1:]] == [str(token) for token in prompt_ids[1:]]
        for index in range(2):
            for piece in pieces(list(outputs), index):
                own = [int(next(iter(entry))) for entry in json.loads(piece.logprobs)]
                assert own == list(unpack_tokens(piece.tokens))
        await holder.idle()


async def test_while_a_prompts_logprobs_are_written_others_are_answered_and_a_cancel_is_taken(
    tiny_llama: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice for each token: a hundred turns of the loop, in which the others' whole answers come."""
    monkeypatch.setattr(prompt_logprobs, "SLICE_ENTRIES", 1)
    prompt = "the cat " * 40
    async with fake_engine(tiny_llama, overlap=overlap, token_budget=1024) as engine:
        holder = engine.holder()
        asking, cancelled = (holder.request(prompt, max_tokens=3, prompt_logprobs=20) for _ in range(2))
        other = holder.request("a dog", max_tokens=3)
        await holder.answer(other)
        assert engine.text is not None and len(engine.text._behind) == 2
        holder.cancel(cancelled)
        end = await holder.answer(cancelled)
        assert isinstance(end, Failed) and end.status is Status.CANCELLED
        for id in (asking, cancelled):
            assert not any(isinstance(output, PromptLogprobs | Chunk) for output in holder.outputs[id])
        await holder.answer(asking)
        kinds = [type(output) for output in holder.outputs[asking]]
        assert kinds[:2] == [Started, PromptLogprobs] and kinds.count(PromptLogprobs) == 1
        await holder.idle()
        assert not engine.text._behind


async def test_a_generation_config_that_no_request_could_have_fails_the_start_unless_it_is_set_aside(
    tiny_llama: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    (model / "generation_config.json").write_text('{"temperature": -1}')
    async with fake_engine(model, ready=False) as engine:
        health = await engine.holder().state(EngineState.FAILED)
        assert health.detail.startswith("generation_config.json: temperature: must be a number in [0, 100], got -1")
    async with fake_engine(model, generation_config="none") as engine:
        holder = engine.holder()
        assert await holder.text(holder.request("the cat", max_tokens=2))


async def test_the_models_defaults_count_where_a_request_says_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    (model / "generation_config.json").write_text('{"temperature": 0.0}')
    async with fake_engine(model) as engine:
        holder = engine.holder()
        end = await holder.answer(holder.request("the cat", n=2))
        assert isinstance(end, Failed) and end.message.startswith("n: must be 1 when temperature is 0")
        assert isinstance(await holder.answer(holder.request("the cat", n=2, temperature=1)), Finished)
