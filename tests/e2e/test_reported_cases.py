"""Problems that users of other servers reported, on the real Triton (the ids are those of docs/cases.md)."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import tritonclient.grpc as sync_grpc

from load.serving import Server, engine_processes, eventually, serving
from load.streams import MODEL, ask, inputs

FAKE = {"device": "fake", "fake_step_ms": 5, "lease_s": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(
        "--model", "smollm2", options=["--model-control-mode=explicit", f"--load-model={MODEL}"], **FAKE
    ) as it:
        yield it


def test_tr_08_stopping_a_synchronous_stream_returns_at_once_and_frees_the_slot(server: Server) -> None:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with sync_grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        tensors = inputs("the cat", stream=True, sampling_parameters={"max_tokens": 2000})
        client.async_stream_infer(MODEL, tensors)
        for _ in range(5):
            assert answers.get(timeout=20)[1] is None
        began = time.monotonic()
        client.stop_stream(cancel_requests=True)
        assert time.monotonic() - began < 1.0
    server.until_idle(1.0)


async def test_rb_06_a_huge_prompt_is_refused_quickly_and_nobody_else_waits(server: Server) -> None:
    gaps: list[float] = []
    health: list[float] = []
    done = asyncio.Event()

    async def watch() -> None:
        async with httpx.AsyncClient() as client:
            while not done.is_set():
                began = time.monotonic()
                assert (await client.get(f"{server.http}/v2/health/ready")).status_code == 200
                health.append(time.monotonic() - began)
                await asyncio.sleep(0.1)

    async def stream() -> None:
        answer = await ask(server.grpc, "the cat", max_tokens=400)
        assert answer.error is None and len(answer.text) > 0
        gaps.extend(later - earlier for earlier, later in zip(answer.times_s, answer.times_s[1:], strict=False))

    async def huge() -> None:
        began = time.monotonic()
        answer = await ask(server.grpc, "word " * 4_000_000)
        assert answer.error is not None and "text_input" in str(answer.error)
        assert time.monotonic() - began < 10.0
        done.set()

    await asyncio.gather(watch(), huge(), *(stream() for _ in range(4)))
    assert max(health) < 1.0
    assert max(gaps) < 2.0


async def test_rb_07_many_requests_at_once_are_all_answered_or_refused_at_the_stated_limit(server: Server) -> None:
    answers = await asyncio.gather(*(ask(server.grpc, "the", max_tokens=1) for _ in range(300)))
    assert all(answer.finals == 1 and answer.reason == "length" for answer in answers)


async def test_tr_04_unload_lets_streams_finish_and_a_new_load_serves(server: Server) -> None:
    await ask(server.grpc, "the cat", cancel_after=3, max_tokens=500)
    assert (await ask(server.grpc, "the cat", temperature=-1)).error is not None
    running = [asyncio.create_task(ask(server.grpc, "the cat", max_tokens=300)) for _ in range(5)]
    await asyncio.to_thread(eventually, lambda: server.stats().running == 5, 10.0, lambda: str(server.stats()))
    async with httpx.AsyncClient(base_url=f"{server.http}/v2/repository", timeout=60) as http:
        assert (await http.post(f"models/{MODEL}/unload")).status_code == 200
        answers = await asyncio.gather(*running)
        assert all(answer.reason == "length" and answer.finals == 1 for answer in answers)
        await asyncio.to_thread(eventually, lambda: _is_unloaded(server), 20.0, lambda: "UNLOADING for ever")
        nobody = "the engine outlives its unload"
        await asyncio.to_thread(eventually, lambda: not engine_processes(server.runtime), 10.0, lambda: nobody)
        assert (await http.post(f"models/{MODEL}/load")).status_code == 200
    assert (await ask(server.grpc, "the cat", max_tokens=3)).finals == 1


def _is_unloaded(server: Server) -> bool:
    index = httpx.post(f"{server.http}/v2/repository/index").json()
    return all(model.get("state") == "UNAVAILABLE" for model in index if model["name"] == MODEL)


def test_rb_05_servers_started_at_the_same_moment_answer_their_own_requests() -> None:
    texts: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()

    def one(tokens: int) -> None:
        with serving("--model", "smollm2", **FAKE) as server:
            answer = asyncio.run(ask(server.grpc, "the cat", max_tokens=tokens))
            texts.put((tokens, answer.reason))

    threads = [threading.Thread(target=one, args=(tokens,)) for tokens in (3, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts.get_nowait() for _ in threads) == [(3, "length"), (5, "length"), (7, "length")]
