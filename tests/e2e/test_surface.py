"""A real model behind Triton as its clients see it: the same text by every way, cancels, deaths. What each input and
output means is the subject of test_conformance.py."""

from __future__ import annotations

import asyncio
import json
import queue
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import tritonclient.grpc as sync_grpc
import tritonclient.grpc.aio as aio_grpc
from tritonclient.utils import InferenceServerException

from load.serving import PATIENCE_S, Server, eventually
from load.streams import MODEL, Answer, ask, ask_on, inputs, take

PROMPT = "The capital of France is"
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{server.http}/v2/models/{MODEL}/", timeout=60) as client:
        yield client


def generate(http: httpx.Client, **body: Any) -> httpx.Response:
    return http.post("generate", json=body)


def generate_stream(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    with http.stream("POST", "generate_stream", json=body) as response:
        return [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]


@pytest.fixture(scope="session")
def expected(running_server: Server) -> str:
    """The greedy answer to PROMPT."""
    body = {"text_input": PROMPT, "exclude_input_in_output": True, **GREEDY}
    answer = httpx.post(f"{running_server.http}/v2/models/{MODEL}/generate", json=body, timeout=60).json()
    text = str(answer["text_output"])
    assert text.startswith(" Paris")
    return text


def test_generate_and_generate_stream_give_the_same_text(http: httpx.Client, expected: str) -> None:
    """Cases TR-07 and TR-10: the paths that work over HTTP; /infer is below."""
    whole = generate(http, text_input=PROMPT, **GREEDY).json()
    assert (whole["text_output"], whole["finish_reason"]) == (PROMPT + expected, "length")
    events = generate_stream(http, text_input=PROMPT, stream=True, **GREEDY)
    assert "".join(event["text_output"] for event in events) == expected
    assert [event["finish_reason"] for event in events] == ["None"] * (len(events) - 1) + ["length"]
    assert len(events) > 1


async def test_an_asyncio_grpc_stream_gives_the_same_text_and_one_final(server: Server, expected: str) -> None:
    answer = await ask(server.grpc, PROMPT, **GREEDY)
    assert (answer.text, answer.reason, answer.finals) == (expected, "length", 1)


def test_a_synchronous_grpc_stream_carries_many_requests_at_once(server: Server, expected: str) -> None:
    results: queue.SimpleQueue[tuple[Any, InferenceServerException | None]] = queue.SimpleQueue()
    answers = {str(number): Answer() for number in range(6)}
    with sync_grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: results.put((result, error)))
        for id in answers:
            tensors = inputs(PROMPT, stream=True, sampling_parameters=GREEDY)
            client.async_stream_infer(MODEL, tensors, request_id=id, enable_empty_final_response=True)
        while not all(answer.finals for answer in answers.values()):
            result, error = results.get(timeout=60)
            assert error is None, error
            take(answers[result.get_response().id], result)
        client.stop_stream()
    assert {answer.text for answer in answers.values()} == {expected}
    assert {answer.finals for answer in answers.values()} == {1}


def test_a_seed_repeats_an_answer_and_another_seed_changes_it(http: httpx.Client) -> None:
    def text(seed: int) -> str:
        answer = generate(http, text_input=PROMPT, temperature=1.0, top_k=50, top_p=0.95, seed=seed, max_tokens=10)
        return str(answer.json()["text_output"])

    assert text(1) == text(1)
    assert len({text(seed) for seed in range(4)}) > 1


async def test_a_cancelled_stream_frees_its_slot_and_pages_long_before_its_end(server: Server) -> None:
    """A tenth of a second later, which is a dozen steps or two. Seconds themselves differ from machine to machine."""
    before = (await asyncio.to_thread(server.stats)).steps
    answer = await ask(server.grpc, PROMPT, cancel_after=3, temperature=0, max_tokens=2000, ignore_eos=True)
    assert len(answer.pieces) == 3
    after = await asyncio.to_thread(server.until_idle)
    assert after.steps - before < 500


async def test_requests_that_wait_for_a_slot_can_be_cancelled(server: Server) -> None:
    before = (await asyncio.to_thread(server.stats)).steps
    async with aio_grpc.InferenceServerClient(server.grpc) as client:
        tasks = [
            asyncio.create_task(ask_on(client, PROMPT, temperature=0, max_tokens=1500, ignore_eos=True))
            for _ in range(80)
        ]
        await asyncio.to_thread(eventually, lambda: server.stats().waiting, PATIENCE_S, lambda: "nobody waits")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    after = await asyncio.to_thread(server.until_idle)
    assert after.steps - before < 1500, "one of them ran on to its end"


def test_a_dropped_http_stream_is_noticed(server: Server, http: httpx.Client) -> None:
    body = {"text_input": PROMPT, "stream": True, "max_tokens": 2000, "ignore_eos": True, "temperature": 0}
    with server.cut_short(2000), http.stream("POST", "generate_stream", json=body) as response:
        next(response.iter_lines())


def test_infer_over_http_is_refused_by_triton_itself(http: httpx.Client) -> None:
    body = {"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [PROMPT]}]}
    answer = http.post("infer", json=body)
    assert answer.status_code == 501 and "decoupled" in answer.text


def test_the_engine_process_dies_and_http_clients_get_an_answer(server: Server, http: httpx.Client) -> None:
    import os
    import signal
    import threading

    answers: queue.SimpleQueue[httpx.Response] = queue.SimpleQueue()
    body = {"text_input": PROMPT, "max_tokens": 2000, "ignore_eos": True}
    thread = threading.Thread(target=lambda: answers.put(generate(http, **body)))
    thread.start()
    eventually(lambda: server.stats().running, PATIENCE_S, lambda: "the request never ran")
    os.kill(dict(server.stats().pids)["worker-0"], signal.SIGKILL)
    answer = answers.get(timeout=PATIENCE_S)
    thread.join()
    assert answer.status_code == 400 and "try again" in answer.text
    eventually(
        lambda: generate(http, text_input=PROMPT, **GREEDY).status_code == 200,
        PATIENCE_S,
        lambda: "the engine never came back",
    )
