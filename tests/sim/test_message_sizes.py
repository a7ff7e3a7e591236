"""What crosses a process costs what it must: a prompt crosses each once, a decode row is a few bytes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from fakes.engine import fake_engine
from minisgl_backend.actors.executors import inline
from minisgl_backend.actors.mailbox import LocalMailbox
from minisgl_backend.messages.client import Outputs, Request
from minisgl_backend.messages.codec import Decoder, encode
from minisgl_backend.messages.engine import Samples, Sequence
from minisgl_backend.messages.ids import RequestId, SequenceId
from minisgl_backend.messages.plan import StepResult
from minisgl_backend.messages.sampling import GREEDY
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.scheduler.limits import Limits
from minisgl_backend.scheduler.scheduler import Scheduler


class RecordedMailbox(LocalMailbox[Any]):
    """As between processes: every message is encoded. Kept in `frames`, which the test gives the class."""

    frames: list[tuple[str, bytes]]

    async def send(self, message: Any) -> None:
        self.frames.append((type(message).__name__, encode(message)))
        await super().send(message)

    def put(self, message: Any) -> None:
        self.frames.append((type(message).__name__, encode(message)))
        super().put(message)


async def test_a_prompt_crosses_each_process_once_in_however_many_chunks_it_is_computed(
    tiny_llama: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames: list[tuple[str, bytes]] = []
    monkeypatch.setattr(RecordedMailbox, "frames", frames, raising=False)
    monkeypatch.setattr(inline, "LocalMailbox", RecordedMailbox)
    draw = random.Random(3)
    prompt = pack_tokens([draw.randrange(20, 300) for _ in range(100)])
    request = Request(RequestId(1), None, b'{"max_tokens": 20, "temperature": 0}', True, True, input_ids=prompt)
    async with fake_engine(tiny_llama, overlap=overlap, max_running=4, token_budget=24) as engine:
        holder = engine.holder()
        holder.outputs[request.id] = []
        holder.send(request)
        await holder.answer(request.id)
        frames += [("Request", encode(request)), ("Outputs", encode(Outputs(tuple(holder.outputs[request.id]))))]
    kinds = {kind for kind, _ in frames}
    assert {"Sequence", "BatchPlan", "StepResult", "Progress"} <= kinds
    assert len([kind for kind, _ in frames if kind == "BatchPlan"]) > 20, "chunks, and a step for each token"
    with_it = [kind for kind, frame in frames if prompt[:40] in frame or prompt[-40:] in frame]
    assert sorted(with_it) == ["BatchPlan", "Request", "Sequence"], "towards the worker once a hop, and never back"
    assert [frame.count(prompt) for kind, frame in frames if kind in with_it and prompt in frame] == [1, 1, 1]


@pytest.mark.slow
async def test_a_form_crosses_to_the_scheduler_once_for_all_answers_and_to_the_worker_once_a_plan(
    tiny_llama: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames: list[tuple[str, bytes]] = []
    monkeypatch.setattr(RecordedMailbox, "frames", frames, raising=False)
    monkeypatch.setattr(inline, "LocalMailbox", RecordedMailbox)
    async with fake_engine(tiny_llama, overlap=overlap, max_running=8) as engine:
        holder = engine.holder()
        await holder.answer(holder.request("the cat", n=8, max_tokens=4, guided_regex="[a-z]{3,9}"))
    (told,) = [frame for kind, frame in frames if kind == "Samples"]
    samples = Decoder[Samples](Samples).decode(told)
    assert samples.count == 8 and samples.first.sampling.grammar is not None
    form = samples.first.sampling.grammar.compiled
    counts = {kind: [frame.count(form) for name, frame in frames if name == kind] for kind, _ in frames}
    assert counts.pop("Samples") == [1]
    assert sum(counts.pop("BatchPlan")) == 1, "all eight are admitted with one plan"
    assert not any(map(sum, counts.values()))


def test_a_decode_row_is_a_few_bytes_on_its_way_to_the_worker_and_back() -> None:
    rows = 64
    limits = Limits(max_running=rows, token_budget=1024, page_size=16, num_pages=4096, context_tokens=2048)
    scheduler = Scheduler(limits, 0)
    draw = random.Random(1)
    for number in range(rows):
        prompt = pack_tokens([draw.randrange(49152) for _ in range(draw.randrange(200, 600))])
        scheduler.add(Sequence(SequenceId(10_000 + number), prompt, GREEDY, 400, ()), 0.0)
    plans, results, reports = [], [], []
    for step in range(200):
        plan = scheduler.plan(0.0)
        assert plan is not None
        result = StepResult(plan.step, tuple(draw.randrange(49152) for sample in plan.row_samples if sample))
        progress = scheduler.apply(result, 0.0)
        if step >= 100:  # all run, and every one of them needs pages again and again
            assert plan.row_lengths == (1,) * rows
            plans.append(len(encode(plan)))
            results.append(len(encode(result)))
            reports.append(len(encode(progress)))
    assert sum(plans) / len(plans) / rows <= 7, "slot, start, length, sample, and a sixteenth of a page"
    assert max(plans) / rows <= 8
    assert max(results) / rows <= 4, "the token"
    assert max(reports) / rows <= 8, "the sequence and its token"
