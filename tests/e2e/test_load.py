"""Many streams at once over the real Triton, on the fake device: right answers, nothing lost, memory at rest."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import psutil
import pytest
import tritonclient.grpc.aio as triton

from load.serving import Server, serving
from load.streams import ask, ask_on

_WARM_UP_ROUNDS = 3
_ROUNDS = 6
_MOST_ROUNDS = 24
_RESPONSES_A_ROUND = 2400


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--model", "smollm2", device="fake", fake_step_ms=2, lease_s=2) as server:
        yield server


async def test_a_third_of_two_hundred_streams_is_cancelled_and_the_rest_is_right(server: Server) -> None:
    chance = random.Random(3)
    prompts = [f"Tell me about the number {number}." for number in range(8)]
    expected = [(await ask(server.grpc, prompt, max_tokens=60)).text for prompt in prompts]
    async with triton.InferenceServerClient(server.grpc) as client:
        doomed = set(chance.sample(range(200), 66))
        answers = await asyncio.gather(
            *(
                ask_on(
                    client,
                    prompts[number % 8],
                    cancel_after=chance.randrange(1, 20) if number in doomed else None,
                    max_tokens=60,
                )
                for number in range(200)
            )
        )
        await asyncio.to_thread(server.until_idle)
    for number, answer in enumerate(answers):
        assert answer.error is None
        if number in doomed:
            assert expected[number % 8].startswith(answer.text)
        else:
            assert (answer.text, answer.reason, answer.finals) == (expected[number % 8], "length", 1)


async def test_streams_dropped_at_random_moments_leave_nothing_running(server: Server) -> None:
    """Case AB-01: also in the gap between two steps, and before the first answer."""
    chance = random.Random(4)
    before = (await asyncio.to_thread(server.stats)).steps

    async def drop() -> None:
        async with triton.InferenceServerClient(server.grpc) as client:
            try:
                async with asyncio.timeout(chance.uniform(0.0, 0.3)):
                    await ask_on(client, "the cat", max_tokens=8000)
            except TimeoutError:
                pass

    await asyncio.gather(*(drop() for _ in range(100)))
    after = await asyncio.to_thread(server.until_idle)
    assert after.steps - before < 8000, "one of them ran on to its end"


async def test_the_stub_does_not_grow_with_the_responses_it_has_sent(server: Server) -> None:
    """Case TR-01. The heap takes a step once in a while, and then stands; what is kept grows however long one looks."""
    stub = psutil.Process(server.pid_of("triton_python_b"))
    sizes: list[int] = []

    def mib_a_round() -> float:
        return (sizes[-1] - sizes[-1 - _ROUNDS]) / 2**20 / _ROUNDS

    async with triton.InferenceServerClient(server.grpc) as client:
        while len(sizes) < _WARM_UP_ROUNDS + _ROUNDS or mib_a_round() >= 0.3:
            assert len(sizes) < _MOST_ROUNDS, f"bytes after each round: {sizes}"
            sent = 0
            while sent < _RESPONSES_A_ROUND:
                answers = await asyncio.gather(*(ask_on(client, "the cat", max_tokens=50) for _ in range(16)))
                sent += sum(len(answer.pieces) for answer in answers)
            sizes.append(stub.memory_info().rss)
