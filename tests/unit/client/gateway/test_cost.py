"""What one token costs the gateway, in things that can be counted: calls of Python, messages to the socket, bytes.

Time is measured by `load/bench/gateway.py`; counts are the same on every machine.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
from starlette.types import Message

from fakes.inference_server import InferenceServer, response
from minisgl_client.aio import AsyncClient
from minisgl_client.gateway.app import build_app
from minisgl_client.gateway.backends import Backend, Backends
from minisgl_client.gateway.settings import GatewaySettings

FEW, MANY = 50, 250
CALLS = 130
"""Of Python functions, for each token: 97 now, 167 with a task for each piece and a parser for each empty list."""


def words(count: int) -> Any:
    """A script: so many pieces of a token, with all that the gateway asks for, as the engine tells it."""
    usage: dict[str, Any] = {"num_input_tokens": [32], "num_cached_tokens": [0], "queue_ms": [1.5], "ttft_ms": [20.5]}

    def script(request: Any, context: Any, server: InferenceServer) -> Iterator[Any]:
        for number in range(count):
            last = number == count - 1
            reason = "length" if last else "None"
            yield response(final=last, text_output=[" word"], finish_reason=[reason], num_output_tokens=[1], **usage)

    return script


async def ask(server: InferenceServer, path: str, body: bytes) -> tuple[list[Message], int]:
    """What one request sends, and the calls of Python functions that it takes in this thread."""
    sent: list[Message] = []
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    async def receive() -> Message:
        if not asked:
            asked.append(True)
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    asked: list[bool] = []
    gone = asyncio.Event()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    async with AsyncClient(server.url) as client:
        app = build_app(GatewaySettings(), Backends(Backend(client)))
        sys.setprofile(count)
        try:
            await app(scope, receive, send)
        finally:
            sys.setprofile(None)
    return sent, calls


CHAT = b'{"messages": [{"role": "user", "content": "Hi"}], "stream": true}'
PROMPT = b'{"prompt": "Hi", "stream": true}'


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)])
async def test_a_token_is_one_message_of_few_bytes_and_few_calls(
    server: InferenceServer, path: str, body: bytes
) -> None:
    seen = []
    for count in (FEW, MANY):
        server.script = words(count)
        seen.append(await ask(server, path, body))
    (few, few_calls), (many, many_calls) = seen
    assert len(many) - len(few) == MANY - FEW
    sizes = {len(message["body"]) for message in many[2:-2]}
    assert max(sizes) <= 240
    assert (many_calls - few_calls) / (MANY - FEW) <= CALLS
