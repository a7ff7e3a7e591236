"""`make soak`: the real model, 64 streams of mixed lengths for two minutes, then cancels of a third of 200 streams."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import tritonclient.grpc.aio as triton

from load.serving import Server, engine_processes, serving
from load.streams import Answer, ask_on
from minisgl_backend.llm import LLM
from minisgl_backend.models.locate import locate_model
from minisgl_backend.text.detokenizer import decode
from minisgl_backend.text.parameters import SamplingParams
from minisgl_backend.text.tokenizer import Tokenizer

pytestmark = pytest.mark.soak

SECONDS = float(os.environ.get("MINISGL_SOAK_S", "120"))
STREAMS = 64
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
LONGEST = 40
PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a small robot who",
    "def fibonacci(n):\n    ",
    "The three primary colours are red,",
    "Water boils at a temperature of",
    "In 1969 the first people walked on the",
    "A good recipe for bread needs flour, water,",
    "The opposite of hot is",
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--model", "smollm2", "--dtype", "fp32", kv_bytes=256 << 20, token_budget=512) as server:
        yield server


@pytest.fixture(scope="module")
def expected() -> dict[str, list[str]]:
    """prompt → its greedy answer of 0, 1, … LONGEST tokens, from an engine that serves one prompt at a time."""
    tokenizer = Tokenizer.load(locate_model("smollm2"))
    texts: dict[str, list[str]] = {}
    with LLM("smollm2", dtype="fp32", kv_bytes=1 << 28) as llm:
        for prompt in PROMPTS:
            (alone,) = llm.generate(prompt, SamplingParams(max_tokens=LONGEST, **GREEDY))
            assert len(alone.token_ids) == LONGEST
            ids = tokenizer.encode(prompt)
            texts[prompt] = [decode(tokenizer, alone.token_ids[:length], ids) for length in range(LONGEST + 1)]
            assert texts[prompt][-1] == alone.text
    return texts


def check(answer: Answer, expected: str) -> None:
    assert answer.error is None, answer.error
    assert (answer.finals, answer.reason, answer.text) == (1, "length", expected)


def sizes(server: Server) -> dict[str, float]:
    """MiB of every process of ours."""
    pids = {child.pid for child in psutil.Process(server.process.pid).children(recursive=True)}
    pids |= engine_processes(server.runtime)
    found = {}
    for pid in sorted(pids):
        process = psutil.Process(pid)
        found[f"{pid} {' '.join(process.cmdline()[-4:])[:60]}"] = process.memory_info().rss / 2**20
    return found


async def test_sixty_four_streams_for_two_minutes(server: Server, expected: dict[str, list[str]]) -> None:
    chance = random.Random(1)
    end = time.monotonic() + SECONDS
    half = time.monotonic() + SECONDS / 2
    middle: dict[str, float] = {}
    answered = 0

    async def user(client: triton.InferenceServerClient) -> None:
        nonlocal answered, middle
        while time.monotonic() < end:
            prompt, length = chance.choice(PROMPTS), chance.randint(1, LONGEST)
            check(await ask_on(client, prompt, max_tokens=length, **GREEDY), expected[prompt][length])
            answered += 1
            if not middle and time.monotonic() > half:
                middle = sizes(server)

    async with triton.InferenceServerClient(server.grpc) as client:
        await asyncio.gather(*(user(client) for _ in range(STREAMS)))
    stats = await asyncio.to_thread(server.until_idle)
    after = sizes(server)
    growth = {name: after[name] - size for name, size in middle.items()}
    print(f"{answered} answers, {stats.steps} steps, MiB gained in the second half: {growth}")
    assert stats.restarts == 0
    assert all(gained < 8.0 for gained in growth.values()), growth


async def test_a_third_of_two_hundred_streams_is_cancelled(server: Server, expected: dict[str, list[str]]) -> None:
    chance = random.Random(2)
    doomed = set(chance.sample(range(200), 66))
    async with triton.InferenceServerClient(server.grpc) as client:
        answers = await asyncio.gather(
            *(
                ask_on(
                    client,
                    PROMPTS[number % len(PROMPTS)],
                    cancel_after=chance.randrange(1, LONGEST) if number in doomed else None,
                    max_tokens=LONGEST,
                    **GREEDY,
                )
                for number in range(200)
            )
        )
        await asyncio.to_thread(server.until_idle)
    for number, answer in enumerate(answers):
        whole = expected[PROMPTS[number % len(PROMPTS)]][LONGEST]
        if number in doomed:
            assert answer.error is None and whole.startswith(answer.text)
        else:
            check(answer, whole)
