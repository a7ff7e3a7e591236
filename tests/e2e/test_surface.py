"""The Triton model as its clients see it: gRPC streams, HTTP generate, errors, cancels."""

from __future__ import annotations

import asyncio
import json
import queue
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import tritonclient.grpc as sync_grpc
import tritonclient.grpc.aio as aio_grpc
from tritonclient.utils import InferenceServerException

from load.serving import Server, eventually
from load.streams import MODEL, Answer, ask, ask_on, inputs, take
from minisgl_backend.serving.tensors import INPUTS

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


def test_generate_answers_once_with_the_prompt_in_front_unless_excluded(http: httpx.Client, expected: str) -> None:
    answer = generate(http, text_input=PROMPT, **GREEDY)
    assert answer.status_code == 200
    assert (answer.json()["text_output"], answer.json()["finish_reason"]) == (PROMPT + expected, "length")
    answer = generate(http, text_input=PROMPT, exclude_input_in_output=True, **GREEDY)
    assert answer.json()["text_output"] == expected


def test_generate_stream_sends_deltas_without_the_prompt(http: httpx.Client, expected: str) -> None:
    events = generate_stream(http, text_input=PROMPT, stream=True, **GREEDY)
    assert "".join(event["text_output"] for event in events) == expected
    assert [event["finish_reason"] for event in events] == ["None"] * (len(events) - 1) + ["length"]
    assert len(events) > 3


def test_parameters_are_read_from_the_tensor_and_from_the_request_as_numbers_and_as_strings(
    http: httpx.Client, expected: str
) -> None:
    as_strings = {key: str(value) for key, value in GREEDY.items()}
    for body in (
        {"sampling_parameters": json.dumps(GREEDY)},
        {"sampling_parameters": json.dumps(as_strings)},
        GREEDY,
        as_strings,
    ):
        answer = generate(http, text_input=PROMPT, exclude_input_in_output=True, **body)
        assert answer.json().get("text_output") == expected, answer.text


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


@pytest.mark.parametrize(
    ("body", "status", "names"),
    [
        ({"temperature": -0.1}, 400, "temperature"),
        ({"temperature": "NaN"}, 400, "temperature"),
        ({"top_p": 1.5}, 400, "top_p"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"stop": "END"}, 400, "stop"),
        ({"n": 5}, 400, "n"),
        ({"temprature": 1}, 400, "did you mean 'temperature'"),
        ({"sampling_parameters": "not json"}, 400, "sampling_parameters"),
        ({"stream": True, "exclude_input_in_output": False}, 400, "exclude_input_in_output"),
        ({"text_input": ""}, 400, "text_input"),
        ({"text_input": "word " * 9000}, 400, "text_input"),
    ],
)
def test_a_bad_request_names_its_field_and_harms_nobody(
    http: httpx.Client, expected: str, body: dict[str, Any], status: int, names: str
) -> None:
    answer = generate(http, **{"text_input": PROMPT, **body})
    assert answer.status_code == status, answer.text
    message = answer.json()["error"]
    assert names in message
    assert "/" not in message.replace("n/a", "") and "Traceback" not in message
    assert generate(http, text_input=PROMPT, exclude_input_in_output=True, **GREEDY).json()["text_output"] == expected


async def test_one_bad_request_among_concurrent_good_ones_fails_alone(server: Server, expected: str) -> None:
    async with aio_grpc.InferenceServerClient(server.grpc) as client:
        good = [ask_on(client, PROMPT, **GREEDY) for _ in range(6)]
        bad = [ask_on(client, PROMPT, temperature=-1), ask_on(client, "", **GREEDY), ask_on(client, PROMPT, bogus=1)]
        answers = await asyncio.gather(*good, *bad)
    assert {answer.text for answer in answers[:6]} == {expected}
    for answer, field in zip(answers[6:], ("temperature", "text_input", "bogus"), strict=True):
        assert answer.error is not None and field in str(answer.error)


def test_bytes_that_are_not_utf8_are_refused_by_name(server: Server) -> None:
    results: queue.SimpleQueue[tuple[Any, InferenceServerException | None]] = queue.SimpleQueue()
    with sync_grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: results.put((result, error)))
        client.async_stream_infer(MODEL, inputs(b"\xff\xfe", stream=True))
        _, error = results.get(timeout=30)
        client.stop_stream()
    assert error is not None and "text_input" in str(error)


async def test_a_prompt_with_zero_bytes_and_emoji_comes_back_exactly(server: Server) -> None:
    prompt = "a\x00b é😀\x00"
    async with aio_grpc.InferenceServerClient(server.grpc) as client:

        async def requests() -> Any:
            yield {"model_name": MODEL, "inputs": inputs(prompt, sampling_parameters={"max_tokens": 1})}

        async for result, error in client.stream_infer(requests()):
            assert error is None
            text = result.as_numpy("text_output").reshape(-1)[0]
            assert text.startswith(prompt.encode())
            break


async def test_a_cancelled_stream_frees_its_slot_and_pages_within_a_second(server: Server) -> None:
    answer = await ask(server.grpc, PROMPT, cancel_after=3, temperature=0, max_tokens=2000, ignore_eos=True)
    assert len(answer.pieces) == 3
    await asyncio.to_thread(server.until_idle, 1.0)


async def test_requests_that_wait_for_a_slot_can_be_cancelled(server: Server) -> None:
    async with aio_grpc.InferenceServerClient(server.grpc) as client:
        tasks = [
            asyncio.create_task(ask_on(client, PROMPT, temperature=0, max_tokens=1500, ignore_eos=True))
            for _ in range(80)
        ]
        await asyncio.to_thread(eventually, lambda: server.stats().waiting, 10.0, lambda: "nobody waits")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.to_thread(server.until_idle, 3.0)


def test_a_dropped_http_stream_is_noticed(server: Server, http: httpx.Client) -> None:
    body = {"text_input": PROMPT, "stream": True, "max_tokens": 2000, "ignore_eos": True, "temperature": 0}
    with http.stream("POST", "generate_stream", json=body) as response:
        next(response.iter_lines())
    server.until_idle(patience_s=3.0)


def test_infer_over_http_is_refused_by_triton_itself(http: httpx.Client) -> None:
    body = {"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [PROMPT]}]}
    answer = http.post("infer", json=body)
    assert answer.status_code == 501 and "decoupled" in answer.text


def test_health_and_metadata_say_what_is_served(server: Server) -> None:
    assert httpx.get(f"{server.http}/v2/health/ready").status_code == 200
    assert httpx.get(f"{server.http}/v2/models/{MODEL}/ready").status_code == 200
    metadata = httpx.get(f"{server.http}/v2/models/{MODEL}").json()
    assert {tensor["name"] for tensor in metadata["inputs"]} == set(INPUTS)
    assert {"text_output", "finish_reason", "output_ids"} < {tensor["name"] for tensor in metadata["outputs"]}


def test_the_engine_process_dies_and_http_clients_get_an_answer(server: Server, http: httpx.Client) -> None:
    import os
    import signal
    import threading

    answers: queue.SimpleQueue[httpx.Response] = queue.SimpleQueue()
    body = {"text_input": PROMPT, "max_tokens": 2000, "ignore_eos": True}
    thread = threading.Thread(target=lambda: answers.put(generate(http, **body)))
    thread.start()
    eventually(lambda: server.stats().running, 10.0, lambda: "the request never ran")
    os.kill(dict(server.stats().pids)["worker-0"], signal.SIGKILL)
    answer = answers.get(timeout=2.0)
    thread.join()
    assert answer.status_code == 400 and "try again" in answer.text
    deadline = time.monotonic() + 60
    while generate(http, text_input=PROMPT, **GREEDY).status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
