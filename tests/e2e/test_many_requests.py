"""A thousand requests at once, on one stream and on a thousand connections; a thousand clients that vanish; bad
requests among good ones. On the fake device: only the model is not the real one.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc.aio as triton

from load.serving import PATIENCE_S, Server, engine_processes, eventually, serving
from load.streams import Answer, ask, ask_many_on, ask_on, connection
from load.transports import Ask, aio_grpc

MANY = 1000
ROUNDS = 5
MOST_ROUNDS = 18
PROMPTS = [f"Tell me about the number {number}." for number in range(8)]
LENGTH = {"max_tokens": 6}  # in long steps: as many at once as with many short ones, and fewer tokens to carry


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Every one of a thousand requests runs at once."""
    many = {"max_running": 1024, "token_budget": 4096, "kv_bytes": 1 << 37}
    with serving("--model", "smollm2", device="fake", fake_step_ms=100, lease_s=2, **many) as server:
        yield server


@pytest.fixture(scope="module")
def expected(server: Server) -> list[str]:
    """The answer to each of PROMPTS, asked alone."""
    return [asyncio.run(ask(server.grpc, prompt, **LENGTH)).text for prompt in PROMPTS]


@dataclass
class Resources:
    """What the processes of a server hold, by role."""

    mib: dict[str, float]  # resident memory: PSS would change with every neighbour that comes or goes
    threads: dict[str, int]
    files: dict[str, int]

    @staticmethod
    def of(server: Server) -> Resources:
        roles = dict(server.stats().pids)
        (roles["host"],) = engine_processes(server.runtime) - set(roles.values())
        roles["stub"] = server.pid_of("triton_python_b")
        processes = {role: psutil.Process(pid) for role, pid in roles.items()}
        return Resources(
            {role: process.memory_info().rss / 2**20 for role, process in processes.items()},
            {role: process.num_threads() for role, process in processes.items()},
            {role: process.num_fds() for role, process in processes.items()},
        )


def at_rest(server: Server) -> Resources:
    """After the last request is gone, and Triton has seen that its connections are."""
    server.until_idle()
    triton_server = psutil.Process(server.pid_of("tritonserver"))

    def closed() -> bool:
        return not [c for c in triton_server.net_connections("tcp") if c.status == psutil.CONN_ESTABLISHED]

    eventually(closed, PATIENCE_S, lambda: "Triton holds connections of clients that are gone")
    return Resources.of(server)


async def assert_flat(server: Server, ask_all: Callable[[], Awaitable[None]]) -> None:
    """Of the same thousand requests again and again, the first time being the warm-up: nothing is kept of them.

    Pools of threads fill as they are used, and the connection of our own last look may still be closing, so two more
    threads and files are allowed; one per request would be a thousand.
    """
    rounds: list[Resources] = []
    while len(rounds) < ROUNDS or growing(rounds):
        assert len(rounds) < MOST_ROUNDS, (growing(rounds), rounds)
        await ask_all()
        rounds.append(await asyncio.to_thread(at_rest, server))
    first, last = rounds[0], rounds[-1]
    for role in first.mib:
        assert last.files[role] <= first.files[role] + 2, (role, rounds)
        assert last.threads[role] <= first.threads[role] + 2, (role, rounds)


def growing(rounds: list[Resources]) -> dict[str, float]:
    """Whose memory grows by how many MiB a round, as the last few tell: a KiB or more for each request, since any
    record or reply that is kept is more.

    The heap takes a step of some MiB once in a while, in a round that nobody can name, and then stands; on a machine
    where much goes on at once it takes more of them. What is kept grows every round, so the median tells, and it tells
    the same however many rounds there are.
    """
    late = rounds[1 - ROUNDS :]
    growth = {
        role: statistics.median(later.mib[role] - earlier.mib[role] for earlier, later in itertools.pairwise(late))
        for role in rounds[0].mib
    }
    return {role: mib for role, mib in growth.items() if mib >= 0.9}


def check(answer: Answer, expected: str) -> None:
    assert answer.error is None, answer.error
    assert (answer.text, answer.reason, answer.finals) == (expected, "length", 1)


async def test_a_thousand_requests_on_one_stream_are_answered_each_with_its_own_text(
    server: Server, expected: list[str]
) -> None:
    requests = {str(number): (PROMPTS[number % 8], LENGTH) for number in range(MANY)}

    async def ask_all() -> None:
        async with connection(server.grpc) as client:
            answers = await ask_many_on(client, requests)
        for number, answer in enumerate(answers.values()):
            check(answer, expected[number % 8])

    await assert_flat(server, ask_all)


async def test_a_thousand_connections_are_answered_each_with_its_own_text(server: Server, expected: list[str]) -> None:
    async def on_its_own(number: int) -> Answer:
        async with connection(server.grpc) as client:
            return await ask_on(client, PROMPTS[number % 8], **LENGTH)

    async def ask_all() -> None:
        answers = await asyncio.gather(*(on_its_own(number) for number in range(MANY)))
        for number, answer in enumerate(answers):
            check(answer, expected[number % 8])

    await assert_flat(server, ask_all)


async def test_rb_07_ten_thousand_single_calls_are_all_answered(server: Server, expected: list[str]) -> None:
    numbers = iter(range(10 * MANY))

    async def caller(client: triton.InferenceServerClient) -> None:
        for number in numbers:
            check(await ask_on(client, PROMPTS[number % 8], **LENGTH), expected[number % 8])

    async with connection(server.grpc) as client:
        await asyncio.gather(*(caller(client) for _ in range(500)))


async def test_a_thousand_connections_that_vanish_in_the_middle_of_an_answer_leave_nothing_behind(
    server: Server, expected: list[str]
) -> None:
    def ask_and_vanish() -> None:
        with subprocess.Popen(
            [sys.executable, "-m", "load.hold", server.grpc, str(MANY)], stdout=subprocess.PIPE, text=True
        ) as client:
            assert client.stdout is not None
            try:
                assert client.stdout.readline(), "an answer ended before all had begun"
                assert server.stats().running == MANY
            finally:
                client.kill()

    await assert_flat(server, partial(asyncio.to_thread, ask_and_vanish))
    check(await ask(server.grpc, PROMPTS[0], **LENGTH), expected[0])


BAD: list[tuple[str | bytes, dict[str, Any], str]] = [
    ("", {}, "text_input"),
    (b"\xff\xfe", {}, "text_input"),
    ("word " * 40_000, {}, "text_input"),
    ("the cat", {"temperature": -1}, "temperature"),
    ("the cat", {"temperature": float("nan")}, "temperature"),
    ("the cat", {"max_tokens": "many"}, "max_tokens"),
    ("the cat", {"bogus": 1}, "bogus"),
    ("the cat", {"stop": [5]}, "stop"),
    ("the cat", {"n": 1_000_000}, "n"),
    ("the cat", {"logit_bias": {"cat": 100}}, "logit_bias"),
]


WRONG_TENSORS: list[tuple[Ask, str]] = [
    (Ask({}), "text_input"),
    (Ask({"text_input": np.array([5], dtype=np.int32)}), "text_input"),
    (Ask({"text_input": ["the cat", "the dog"]}), "text_input"),
    (Ask({"text_input": "the cat", "input_ids": [5]}), "text_input"),
    (Ask({"input_ids": [-1]}), "input_ids"),
    (Ask({"messages": "hello"}), "messages"),
    (Ask({"text_input": "the cat", "temperature": np.array([0.5], dtype=np.float32)}), "temperature"),
    (Ask({"text_input": "the cat"}, {"stream": "maybe"}), "stream"),
]


@pytest.mark.parametrize("own_connections", [False, True], ids=["one connection", "own connections"])
async def test_bad_requests_among_concurrent_good_ones_fail_alone(
    server: Server, expected: list[str], own_connections: bool
) -> None:
    """On streams of one connection, and on connections of their own."""

    async def put(shared: triton.InferenceServerClient, text: str | bytes, parameters: dict[str, Any]) -> Answer:
        if not own_connections:
            return await ask_on(shared, text, **parameters)
        async with connection(server.grpc) as client:
            return await ask_on(client, text, **parameters)

    before = await asyncio.to_thread(server.stats)
    async with connection(server.grpc) as shared:
        good = [put(shared, PROMPTS[number % 8], LENGTH) for number in range(200)]
        bad = [put(shared, text, parameters) for text, parameters, _ in BAD * 10]
        mixed = [task for pair in itertools.zip_longest(good, bad) for task in pair if task is not None]
        names = [name for pair in itertools.zip_longest(range(200), BAD * 10) for name in pair if name is not None]
        wrong = asyncio.gather(*(aio_grpc(server.grpc, wrong_ask) for wrong_ask, _ in WRONG_TENSORS * 5))
        answers = await asyncio.gather(*mixed)
        outcomes = await wrong
    for answer, name in zip(answers, names, strict=True):
        if isinstance(name, int):
            check(answer, expected[name % 8])
        else:
            assert answer.error is not None and name[2] in str(answer.error), (name, answer.error)
            assert answer.pieces == []
    for outcome, (wrong_ask, field) in zip(outcomes, WRONG_TENSORS * 5, strict=True):
        assert outcome.error is not None and field in outcome.error and outcome.responses == [], (wrong_ask, outcome)
    after = await asyncio.to_thread(server.until_idle)
    assert (after.restarts, after.pids) == (before.restarts, before.pids)
