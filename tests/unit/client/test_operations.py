"""What is no generation, asked by both clients: what goes out, the result, and errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from fakes.inference_server import InferenceServer, aborts, inputs_of, pieces, response, says, words
from minisgl_client.aio import AsyncClient
from minisgl_client.client import Client
from minisgl_client.errors import RequestRefused, ServerFault, TimedOut, Unavailable

Ask = Callable[..., Any]


def ask_sync(url: str, *args: Any, **fields: Any) -> Any:
    with Client(url) as client:
        return client.ask(*args, **fields)


def ask_async(url: str, *args: Any, **fields: Any) -> Any:
    async def ask() -> Any:
        async with AsyncClient(url) as client:
            return await client.ask(*args, **fields)

    return asyncio.run(ask())


@pytest.fixture(params=[ask_sync, ask_async])
def ask(request: pytest.FixtureRequest) -> Ask:
    found: Ask = request.param
    return found


def result(told: Any, *, final: bool = True) -> Any:
    return response(final=final, result=[json.dumps(told)])


def test_a_question_is_an_operation_with_nothing_that_a_generation_needs(server: InferenceServer, ask: Ask) -> None:
    server.script = says(result({"state": "ready"}))
    assert ask(server.url, "engine") == {"state": "ready"}
    assert inputs_of(server.requests[0]) == {"operation": "engine"}


def test_prompts_and_parameters_go_out_as_with_a_generation(server: InferenceServer, ask: Ask) -> None:
    server.script = says(result({"count": 1}))
    assert ask(server.url, "tokenize", "Hé", add_special_tokens=False, request_id="r") == {"count": 1}
    ask(server.url, "detokenize", input_ids=[5, 6])
    ask(server.url, "tokenize", messages=[{"role": "user", "content": "Hi"}], tools=[])
    text, ids, chat = map(inputs_of, server.requests)
    assert text == {"operation": "tokenize", "text_input": "Hé", "sampling_parameters": '{"add_special_tokens": false}'}
    assert ids == {"operation": "detokenize", "input_ids": [5, 6]} and server.requests[0].id == "r"
    assert chat["messages"] == '[{"role": "user", "content": "Hi"}]' and chat["tools"] == "[]"


def test_a_large_result_has_its_final_behind_it(server: InferenceServer, ask: Ask) -> None:
    large = {"tokens": [*range(20_000)]}
    server.script = says(result(large, final=False), response(final=True))
    assert ask(server.url, "tokenize", "x") == large


def test_errors_are_those_of_any_request(server: InferenceServer, ask: Ask) -> None:
    server.script = aborts(grpc.StatusCode.INVALID_ARGUMENT, "operation: must be one of")
    with pytest.raises(RequestRefused, match="operation: must be one of"):
        ask(server.url, "enigne")
    server.script = aborts(grpc.StatusCode.UNAVAILABLE, "the engine is not ready")
    with pytest.raises(Unavailable):
        ask(server.url, "tokenize", "x")
    server.script = says(words("unexpected inference input 'operation' for model 'minisgl'"))  # an older server
    with pytest.raises(RequestRefused, match="unexpected inference input"):
        ask(server.url, "engine")


@pytest.mark.parametrize(
    "script",
    [
        pieces("a generation"),
        says(response(final=True)),
        says(response(final=True, result=["no JSON"])),
        says(result({}, final=False)),
    ],
)
def test_what_is_no_result_is_the_servers_fault(server: InferenceServer, ask: Ask, script: Any) -> None:
    server.script = script
    with pytest.raises(ServerFault):
        ask(server.url, "engine")


def test_a_time_may_be_set(server: InferenceServer, ask: Ask) -> None:
    def silent(request: Any, context: Any, server: InferenceServer) -> Any:
        while context.is_active() and not server.stopping.wait(0.02):
            pass
        yield from ()

    server.script = silent
    with pytest.raises(TimedOut):
        ask(server.url, "engine", timeout_s=0.3)
