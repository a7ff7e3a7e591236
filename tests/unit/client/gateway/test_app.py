"""The gateway's HTTP, over a gRPC server that answers as a test tells it."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import AsyncIterator
from threading import Semaphore
from typing import Any

import grpc
import httpx
import pytest

from fakes.gateway import error_of, gateway
from fakes.inference_server import InferenceServer, aborts, inputs_of, pieces, response, says, then_waits, words
from minisgl_client.aio import AsyncClient
from minisgl_client.gateway import app
from minisgl_client.gateway.app import build_app
from minisgl_client.gateway.backends import Backend, Backends
from minisgl_client.gateway.fields import ChatBody
from minisgl_client.gateway.mapping import Plan, plan_chat
from minisgl_client.gateway.settings import GatewaySettings

PATIENCE_S = 60.0
CHAT = {"model": "minisgl", "messages": [{"role": "user", "content": "Hi"}]}
PROMPT = {"model": "minisgl", "prompt": "x"}
JSON = {"content-type": "application/json"}
INVALID, UNAVAILABLE = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE


def events(answer: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def test_the_models_are_one_by_the_name_it_is_served_under(server: InferenceServer) -> None:
    async with gateway(server, served_name="small/one") as http:
        listed = (await http.get("/v1/models")).json()
        assert listed["object"] == "list" and [model["id"] for model in listed["data"]] == ["small/one"]
        assert (await http.get("/v1/models/small/one")).json() == listed["data"][0]
        answer = await http.post("/v1/completions", json=PROMPT)
    assert answer.status_code == 404
    assert error_of(answer)["code"] == "model_not_found" and not server.requests


async def test_an_answer_in_one_piece_and_as_a_stream(server: InferenceServer) -> None:
    server.script = pieces("Paris", " é", "", reason="stop")
    async with gateway(server) as http:
        stream = await http.post("/v1/chat/completions", json={**CHAT, "stream": True})
        server.script = pieces("Paris é", reason="stop")
        whole = await http.post("/v1/chat/completions", json=CHAT)
    assert whole.json()["choices"][0]["message"]["content"] == "Paris é"
    assert stream.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(stream)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Paris é"
    assert [inputs_of(request).get("stream") for request in server.requests] == [True, None]


async def test_prompts_of_one_request_are_asked_at_once_and_answered_in_their_order(server: InferenceServer) -> None:
    def echo(request: Any, context: Any, server: InferenceServer) -> Any:
        yield response(final=True, text_output=[inputs_of(request)["text_input"] * 2], finish_reason=["stop"])

    server.script = echo
    async with gateway(server) as http:
        answer = await http.post("/v1/completions", json={**PROMPT, "prompt": ["a", "b", "c"]})
        stream = await http.post("/v1/completions", json={**PROMPT, "prompt": ["a", "b", "c"], "stream": True})
    assert [choice["text"] for choice in answer.json()["choices"]] == ["aa", "bb", "cc"]
    *chunks, _ = events(stream)
    assert sorted((c["choices"][0]["index"], c["choices"][0]["text"]) for c in chunks) == [
        (0, "aa"),
        (1, "bb"),
        (2, "cc"),
    ]


@pytest.mark.parametrize(
    ("status", "message", "answered", "code", "param"),
    [
        (INVALID, "top_p: must be a number in (0, 1], got 0", 400, None, "top_p"),
        (INVALID, "max_tokens: must be an integer", 400, None, "max_completion_tokens"),
        (INVALID, "messages: the prompt is too long: 9 tokens", 400, "context_length_exceeded", "messages"),
        (grpc.StatusCode.UNIMPLEMENTED, "messages: only text", 400, "unsupported", "messages"),
        (UNAVAILABLE, "the queue is full; try again later", 429, "queue_full", None),
        (UNAVAILABLE, "the engine is not ready; try again in a moment", 503, "unavailable", None),
        (UNAVAILABLE, "the deadline of this request passed", 504, "timeout", None),
        (grpc.StatusCode.INTERNAL, "the answer could not be computed", 500, "server_fault", None),
    ],
)
async def test_what_the_engine_refuses_has_openais_shape(
    server: InferenceServer, status: grpc.StatusCode, message: str, answered: int, code: str | None, param: str | None
) -> None:
    server.script = aborts(status, message)
    async with gateway(server) as http:
        for stream in (False, True):  # no word has come: a stream has a status, too
            answer = await http.post(
                "/v1/chat/completions", json={**CHAT, "max_completion_tokens": 5, "stream": stream}
            )
            assert answer.status_code == answered
            error = error_of(answer)
            assert (error["code"], error["param"]) == (code, param)
            assert ("retry-after" in answer.headers) is (answered in (429, 503))
            if param is not None:
                assert error["message"].startswith(f"{param}: ")


async def test_a_model_that_triton_has_not_is_no_fault_of_the_client(server: InferenceServer) -> None:
    server.script = says(words("Request for unknown model: 'minisgl' is not found"))
    async with gateway(server) as http:
        answer = await http.post("/v1/completions", json=PROMPT)
        assert (answer.status_code, error_of(answer)["code"]) == (503, "unavailable")
        assert (await http.get("/health")).status_code == 503


async def test_an_engine_that_dies_in_a_stream_is_an_event_and_no_end(server: InferenceServer) -> None:
    server.script = aborts(UNAVAILABLE, "the engine stopped unexpectedly", "Par")
    async with gateway(server) as http:
        told = events(await http.post("/v1/completions", json={**PROMPT, "stream": True}))
    assert told[0]["choices"][0]["text"] == "Par"
    assert told[-1]["error"]["code"] == "unavailable" and "[DONE]" not in told


async def test_an_answer_that_takes_too_long_is_a_timeout_and_is_cancelled(server: InferenceServer) -> None:
    server.script = then_waits()
    async with gateway(server, timeout_s=1.0) as http:
        answer = await http.post("/v1/completions", json=PROMPT)
    assert (answer.status_code, error_of(answer)["code"]) == (504, "timeout")
    assert await asyncio.to_thread(server.cancelled.acquire, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v2", 404, "unknown_url"),
        ("GET", "/metrics", 404, "unknown_url"),
        ("POST", "/v1/embeddings", 404, "unknown_url"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ],
)
async def test_other_urls_and_methods_are_refused(
    server: InferenceServer, method: str, path: str, status: int, code: str
) -> None:
    async with gateway(server) as http:
        answer = await http.request(method, path)
    assert (answer.status_code, error_of(answer)["code"]) == (status, code)


async def test_a_body_is_json_of_a_bounded_size(server: InferenceServer) -> None:
    async def chunked() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 10

    json_type = {"content-type": "application/json; charset=utf-8"}
    async with gateway(server, max_body_bytes=100) as http:
        cases = [
            (await http.post("/v1/completions", content=b"{", headers=json_type), 400, "invalid_json"),
            (await http.post("/v1/completions", content=b" " * 101, headers=json_type), 413, "body_too_large"),
            (await http.post("/v1/completions", content=chunked(), headers=json_type), 413, "body_too_large"),
            (await http.post("/v1/completions", data={"prompt": "x"}), 415, "unsupported_media_type"),
            (await http.post("/v1/completions", content=b"{}"), 415, "unsupported_media_type"),
        ]
    for answer, status, code in cases:
        assert (answer.status_code, error_of(answer)["code"]) == (status, code)


async def test_a_body_that_does_not_come_whole_in_time_is_refused(server: InferenceServer) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(0)

    async with gateway(server, body_s=0.02, max_body_bytes=1 << 40) as http:
        answer = await http.post("/v1/completions", content=endless(), headers={"content-type": "application/json"})
    assert (answer.status_code, error_of(answer)["code"]) == (408, "too_slow")
    assert answer.headers["connection"] == "close"


async def test_what_is_large_is_read_and_planned_in_a_thread(
    server: InferenceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else everybody's stream stands still meanwhile."""
    beside: list[bool] = []

    def planned(body: ChatBody) -> Plan:
        beside.append(threading.current_thread() is not threading.main_thread())
        return plan_chat(body)

    monkeypatch.setattr(app, "plan_chat", planned)
    server.script = pieces("Paris", reason="stop")
    messages = [{"role": "user", "content": "é\u2028\0"}] * 10_000
    async with gateway(server) as http:
        for sent in (messages[:1], messages):
            answer = await http.post("/v1/chat/completions", json={"messages": sent})
            assert answer.json()["choices"][0]["message"]["content"] == "Paris"
            assert json.loads(inputs_of(server.requests[-1])["messages"]) == sent
        wrong = await http.post("/v1/chat/completions", json={"messages": messages, "temprature": 1})
    assert beside == [False, True] and error_of(wrong)["code"] == "unknown_parameter"


async def test_messages_of_any_depth_are_sent_or_refused(server: InferenceServer) -> None:
    server.script = pieces("Paris", reason="stop")
    statuses = []
    async with gateway(server) as http:
        for depth in range(10, 1200, 7):
            content = b"[" * depth + b"]" * depth
            body = b'{"messages": [{"role": "user", "content": ' + content + b"}]}"
            answer = await http.post("/v1/chat/completions", content=body, headers=JSON)
            statuses.append(answer.status_code)
    assert statuses == sorted(statuses) and set(statuses) == {200, 400}


async def test_a_key_opens_the_api_and_the_health_needs_none(server: InferenceServer) -> None:
    async with gateway(server, api_keys=("one", "two")) as http:
        for headers in ({}, {"Authorization": "Bearer on"}, {"Authorization": "Basic one"}, {"Authorization": "one"}):
            for path in ("/v1/models", "/v1/nothing", "/metrics"):
                answer = await http.get(path, headers=headers)
                assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
                assert error_of(answer)["code"] == "invalid_api_key"
        for key in ("one", "two"):
            assert (await http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})).status_code == 200
        server.script = aborts(INVALID, "max_tokens: must be at least 1")
        assert (await http.get("/health")).json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("status", "message", "healthy"),
    [
        (INVALID, "max_tokens: must be an integer from 1", True),
        (UNAVAILABLE, "the queue is full; try again later", True),
        (UNAVAILABLE, "the engine is down; the server's log says why", False),
    ],
)
async def test_the_health_is_the_engines(
    server: InferenceServer, status: grpc.StatusCode, message: str, healthy: bool
) -> None:
    server.script = aborts(status, message)
    async with gateway(server) as http:
        assert ((await http.get("/health")).status_code == 200) is healthy


@pytest.mark.parametrize("healthy", [True, False])
async def test_any_number_who_want_the_health_at_once_share_an_answer(server: InferenceServer, healthy: bool) -> None:
    server.script = aborts(INVALID, "max_tokens: must be at least 1") if healthy else aborts(UNAVAILABLE, "down")
    async with gateway(server) as http:
        answers = await asyncio.gather(*(http.get("/health") for _ in range(50)))
    assert {answer.status_code for answer in answers} == {200 if healthy else 503} and len(server.requests) <= 5


async def test_metrics_that_nobody_tells_are_unavailable(server: InferenceServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with gateway(server, metrics_url=f"http://127.0.0.1:{port}/metrics") as http:
        answer = await http.get("/metrics")
    assert (answer.status_code, error_of(answer)["code"]) == (503, "unavailable")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((host, 200) for host in ("localhost", "LOCALHOST:9000", "a.localhost:1", "127.0.0.1:9000", "10.0.0.5")),
        *((host, 200) for host in ("[::1]:9000", "[::1]", "llm.example", "LLM.example.:443", "")),
        *((host, 403) for host in ("evil.example", "evil.example:9000", "localhost.evil.example", "127.0.0.1.evil")),
    ],
)
async def test_a_page_that_makes_its_own_name_lead_here_is_refused(
    server: InferenceServer, host: str, status: int
) -> None:
    async with gateway(server, hosts=("llm.example",)) as http:
        answer = await http.get("/v1/models", headers={"host": host})
        assert answer.status_code == status and (status == 200 or error_of(answer)["code"] == "unknown_host")
    async with gateway(server) as http:
        assert (await http.get("/v1/models", headers={"host": host})).status_code == 200, "it is not looked at"


async def test_pages_of_the_named_origins_may_ask(server: InferenceServer) -> None:
    asks = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    async with gateway(server, origins=("https://a.example",), api_keys=("one",)) as http:
        allowed = await http.options("/v1/completions", headers=asks)  # a browser sends no key with it
        other = await http.options("/v1/completions", headers={**asks, "Origin": "https://b.example"})
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-origin" not in other.headers
    async with gateway(server) as http:
        assert "access-control-allow-origin" not in (await http.get("/v1/models", headers=asks)).headers


async def test_a_model_without_a_parser_is_asked_again_without_and_that_is_remembered(server: InferenceServer) -> None:
    def script(request: Any, context: Any, server: InferenceServer) -> Any:
        if inputs_of(request).get("parse_output"):
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "parse_output: this model has no parser: no marks")
        yield response(final=True, text_output=["Hello"], finish_reason=["stop"])

    server.script = script
    tools = [{"type": "function", "function": {"name": "clock"}}]
    async with gateway(server) as http:
        for _ in range(2):
            answer = await http.post("/v1/chat/completions", json=CHAT)
            assert answer.json()["choices"][0]["message"]["content"] == "Hello"
        assert [inputs_of(request).get("parse_output") for request in server.requests] == [True, None, None]
        answer = await http.post("/v1/chat/completions", json={**CHAT, "tools": tools})
    assert answer.status_code == 400 and error_of(answer)["param"] == "tools"


@pytest.mark.parametrize("texts", [(), ("Par",)], ids=["before the first word", "within a stream"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_its_request(
    server: InferenceServer, texts: tuple[str, ...], stream: bool
) -> None:
    came = Semaphore(0)

    def script(request: Any, context: Any, server: InferenceServer) -> Any:
        came.release()
        yield from then_waits(*texts)(request, context, server)

    server.script = script
    body = json.dumps({**PROMPT, "stream": stream, "prompt": ["x", "y"]}).encode()
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(b"content-type", b"application/json")],
        "query_string": b"",
    }
    leaves = asyncio.Event()
    read = iter([{"type": "http.request", "body": body}])

    async def receive() -> Any:
        if message := next(read, None):
            return message
        await leaves.wait()
        return {"type": "http.disconnect"}

    began = asyncio.Event()

    async def send(message: Any) -> None:
        began.set()

    async with AsyncClient(server.url) as client:
        asgi = build_app(GatewaySettings(), Backends(Backend(client)))
        asking = asyncio.ensure_future(asgi(scope, receive, send))
        for _ in range(2):
            assert await asyncio.to_thread(came.acquire, timeout=PATIENCE_S)
        if stream and texts:
            await asyncio.wait_for(began.wait(), PATIENCE_S)
        leaves.set()
        await asyncio.wait_for(asking, PATIENCE_S)
        for _ in range(2):
            assert await asyncio.to_thread(server.cancelled.acquire, timeout=PATIENCE_S)


async def test_the_log_has_a_line_a_request_and_none_of_its_words(
    server: InferenceServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "minisgl.gateway")
    server.script = pieces("an answer", reason="stop")
    async with gateway(server, api_keys=("secret-key",)) as http:
        key = {"Authorization": "Bearer secret-key"}
        answer = await http.post("/v1/completions", json={**PROMPT, "prompt": "a question"}, headers=key)
        await http.post("/v1/completions", json={**PROMPT, "a question": 1}, headers=key)
        await http.get("/v1/a-question")
    lines = [record.getMessage() for record in caplog.records if record.name == "minisgl.gateway"]
    assert [line.split()[:3] for line in lines] == [
        ["POST", "/v1/completions", "200"],
        ["POST", "/v1/completions", "400"],
        ["GET", "-", "401"],
    ]
    assert answer.headers["x-request-id"] in lines[0] and "finish=stop" in lines[0]
    assert not any(word in line for line in lines for word in ("question", "answer", "secret"))


class Broken(Backends):
    """Has a bug."""

    def choose(self, plan: Plan | None = None) -> Backend:
        raise ZeroDivisionError("a secret of the gateway")


async def test_a_fault_of_our_own_is_an_error_of_the_same_shape(server: InferenceServer) -> None:
    async with AsyncClient(server.url) as client:
        transport = httpx.ASGITransport(
            build_app(GatewaySettings(), Broken(Backend(client))), raise_app_exceptions=False
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            answer = await http.post("/v1/completions", json=PROMPT)
    assert answer.status_code == 500 and error_of(answer)["code"] == "gateway_fault" and "secret" not in answer.text
