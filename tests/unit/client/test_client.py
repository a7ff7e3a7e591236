"""Both clients against a gRPC server in this process: what goes out, what comes back, and how each end looks."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import msgspec
import pytest

from fakes.clients import generate_async, generate_sync
from fakes.inference_server import (
    InferenceServer,
    Script,
    aborts,
    inputs_of,
    pieces,
    response,
    says,
    then_waits,
    words,
)
from minisgl_client.aio import AsyncClient
from minisgl_client.client import Client
from minisgl_client.errors import (
    BrokenOff,
    Cancelled,
    ClientError,
    RequestRefused,
    ServerFault,
    TimedOut,
    Unavailable,
    Unsupported,
)
from minisgl_client.pieces import Answer, Logprob, Sample, Usage

PATIENCE_S = 60.0
CHAT = [{"role": "user", "content": "Hé?"}]

Collect = Callable[..., tuple[list[str], ClientError | None]]
"""collect(url, **fields): the texts of a stream's pieces, and the error that ended it."""


def collect_sync(url: str, *, client: dict[str, Any] | None = None, **fields: Any) -> Any:
    texts: list[str] = []
    with Client(url, **client or {}) as connection:
        try:
            texts.extend(piece.text for piece in connection.stream(**fields))
        except ClientError as error:
            return texts, error
    return texts, None


def collect_async(url: str, *, client: dict[str, Any] | None = None, **fields: Any) -> Any:
    async def collect() -> Any:
        texts: list[str] = []
        async with AsyncClient(url, **client or {}) as connection:
            try:
                async for piece in connection.stream(**fields):
                    texts.append(piece.text)
            except ClientError as error:
                return texts, error
        return texts, None

    return asyncio.run(asyncio.wait_for(collect(), PATIENCE_S))


both = pytest.mark.parametrize("collect", [collect_sync, collect_async])
both_generate = pytest.mark.parametrize("generate", [generate_sync, generate_async])


@both
def test_the_pieces_come_in_order_and_the_request_says_what_was_asked(
    server: InferenceServer, collect: Collect
) -> None:
    fields: dict[str, Any] = {"max_tokens": 3, "temperature": 0.5, "seed": None, "stop_token_ids": (1, 2)}
    texts, error = collect(server.url, text="The capital — of France", request_id="r1", **fields)
    assert (texts, error) == (["Paris", " é", ""], None)
    (request,) = server.requests
    assert (request.model_name, request.id) == ("minisgl", "r1")
    sent = inputs_of(request)
    parameters = json.loads(sent.pop("sampling_parameters"))
    assert parameters == {"max_tokens": 3, "temperature": 0.5, "stop_token_ids": [1, 2]}
    asked = ("stream", "return_num_input_tokens", "return_num_output_tokens", "return_perf_metrics")
    assert sent == {"text_input": "The capital — of France", **dict.fromkeys(asked, True)}
    assert server.metadata["triton_grpc_error"] == "true"


@both
@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"messages": CHAT}, "messages", json.dumps(CHAT, ensure_ascii=False)),
        ({"messages": msgspec.Raw(b'[{"role":"user"}]')}, "messages", '[{"role":"user"}]'),
        ({"input_ids": range(4)}, "input_ids", [0, 1, 2, 3]),
        ({"input_ids": ()}, "input_ids", []),
    ],
)
def test_a_chat_and_token_ids_are_prompts_too(
    server: InferenceServer, collect: Collect, fields: dict[str, Any], name: str, value: Any
) -> None:
    assert collect(server.url, return_usage=False, **fields)[1] is None
    assert inputs_of(server.requests[0]) == {name: value, "stream": True}


@both
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "text, messages, input_ids"),
        ({"text": "x", "messages": CHAT}, "text, messages, input_ids"),
        ({"text": "\ud800"}, "text"),
        ({"text": b"bytes"}, "text"),
        ({"input_ids": [2**31]}, "input_ids"),
        ({"input_ids": ["1"]}, "input_ids"),
        ({"messages": [{"role": "user", "content": "\udfff"}]}, "messages"),
        ({"messages": [{"role": "user", "content": object()}]}, "messages"),
        ({"text": "x", "temperature": float("nan")}, "temperature"),
        ({"text": "x", "chat_template_kwargs": {"a": {1}}}, "chat_template_kwargs"),
        ({"text": "x", "timeout_s": 0}, "timeout_s"),
        ({"text": "x", "timeout_s": float("nan")}, "timeout_s"),
        ({"text": "x", "timeout_s": 1e300}, "timeout_s"),  # gRPC: a time that has passed
        ({"text": "x", "request_id": 5}, "request_id"),
        ({"text": "x", "request_id": "\ud800"}, "request_id"),
        ({"input_ids": 5}, "input_ids"),
        ({"messages": iter(())}, "messages"),
    ],
)
def test_what_can_not_be_sent_is_refused_by_name_before_it_is(
    server: InferenceServer, collect: Collect, fields: dict[str, Any], named: str
) -> None:
    texts, error = collect(server.url, **fields)
    assert isinstance(error, RequestRefused) and str(error).startswith(f"{named}: ")
    assert (texts, server.requests) == ([], [])


@both_generate
def test_a_whole_answer_carries_its_text_reason_tokens_and_usage(
    server: InferenceServer, generate: Callable[..., Answer]
) -> None:
    told = {"num_input_tokens": [5], "num_cached_tokens": [2], "ttft_ms": [1.5], "queue_ms": [0.25]}
    server.script = says(
        response(
            final=False, text_output=["ab"], finish_reason=["None"], output_ids=[7, -8], num_output_tokens=[2], **told
        ),
        response(final=False, text_output=["c"], finish_reason=["stop"], output_ids=[9], num_output_tokens=[1], **told),
        response(final=True),
    )
    answer = generate(server.url, text="x", return_output_ids=True)
    assert answer == Answer("abc", "stop", (7, -8, 9), Usage(5, 3, 2, 1.5, 0.25))
    sent = inputs_of(server.requests[0])
    assert "stream" not in sent and sent["exclude_input_in_output"] and sent["return_output_ids"]


@both_generate
def test_several_answers_are_samples_with_their_own_ids_and_logprobs(
    server: InferenceServer, generate: Callable[..., Answer]
) -> None:
    def told(*tokens: int) -> str:
        return json.dumps([{str(i): {"logprob": -0.5, "rank": 1, "decoded_token": "x"}} for i in tokens])

    half = {"logprob": -1, "rank": 2, "decoded_token": "\ufffd", "bytes": [240]}
    server.script = says(
        response(
            final=False,
            text_output=["a", "x"],
            finish_reason=["None", "stop"],
            output_ids=[1, 2, 3],
            num_output_tokens=[1, 2],
            logprobs=[told(1), told(2, 3)],
            prompt_token_ids=[8, 9],
            prompt_logprobs=[json.dumps([None, {"9": half}])],
        ),
        response(
            final=True,
            text_output=["b", ""],
            finish_reason=["length", "stop"],
            output_ids=[4],
            num_output_tokens=[1, 0],
            logprobs=[told(4), "[]"],
        ),
    )
    answer = generate(server.url, text="x", n=2, logprobs=0, return_output_ids=True, return_usage=False)
    entry = Logprob(-0.5, 1, "x")
    assert answer.samples == (
        Sample("ab", "length", (1, 4), ({1: entry}, {4: entry})),
        Sample("x", "stop", (2, 3), ({2: entry}, {3: entry})),
    )
    assert (answer.text, answer.finish_reason, answer.output_ids) == ("ab", "length", (1, 4))
    assert answer.prompt_ids == (8, 9)
    assert answer.prompt_logprobs == (None, {9: Logprob(-1, 2, "\ufffd", (240,))})
    sent = inputs_of(server.requests[0])
    assert sent["return_logprobs"] and sent["return_num_output_tokens"]


def test_a_piece_says_what_is_its_own(server: InferenceServer) -> None:
    with Client(server.url) as client:
        first, second, last = client.stream("x")
    assert (first.text, first.finish_reason, first.output_ids, first.usage) == ("Paris", None, None, Usage())
    assert (second.finish_reason, last.finish_reason) == (None, "length")


@both
@pytest.mark.parametrize(
    ("script", "kind", "status"),
    [
        (aborts(grpc.StatusCode.INVALID_ARGUMENT, "top_p: no"), RequestRefused, "INVALID_ARGUMENT"),
        (aborts(grpc.StatusCode.UNIMPLEMENTED, "stop: no"), Unsupported, "UNIMPLEMENTED"),
        (aborts(grpc.StatusCode.UNAVAILABLE, "the queue is full"), Unavailable, "UNAVAILABLE"),
        (aborts(grpc.StatusCode.UNAVAILABLE, "the engine died", "Pa", "ris"), BrokenOff, "UNAVAILABLE"),
        (aborts(grpc.StatusCode.INTERNAL, "no usable token", "Pa"), ServerFault, "INTERNAL"),
        (aborts(grpc.StatusCode.UNKNOWN, "?"), ServerFault, "UNKNOWN"),
        (aborts(grpc.StatusCode.CANCELLED, "cancelled there"), Cancelled, "CANCELLED"),
        (aborts(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline_ms: passed"), TimedOut, "DEADLINE_EXCEEDED"),
        (says(words("Request for unknown model: 'x' is not found")), RequestRefused, "NOT_FOUND"),
        (says(words("Request for unknown model: 'x' has no available versions")), Unavailable, "UNAVAILABLE"),
        (says(words("unexpected inference input 'y' for model 'x'")), RequestRefused, "INVALID_ARGUMENT"),
        (says(), ServerFault, "INTERNAL"),
        (says(response(final=False, text_output=["a"])), ServerFault, "INTERNAL"),
        (says(response(final=True, text_output=[b"\xff"], finish_reason=["stop"])), ServerFault, "INTERNAL"),
    ],
)
def test_every_way_of_failing_is_an_error_of_its_kind(
    server: InferenceServer, collect: Collect, script: Script, kind: type[ClientError], status: str
) -> None:
    server.script = script
    texts, error = collect(server.url, text="x")
    assert type(error) is kind and error.status == status
    assert "".join(texts) in ("", "Pa", "Paris", "a")


@both
def test_a_server_that_is_not_there_is_unavailable(collect: Collect) -> None:
    texts, error = collect("127.0.0.1:1", text="x")
    assert type(error) is Unavailable and texts == []


@both
def test_something_that_does_not_speak_grpc_is_unavailable(collect: Collect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            listener.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        _, error = collect(f"127.0.0.1:{listener.getsockname()[1]}", text="x", timeout_s=PATIENCE_S)
        thread.join()
    assert type(error) is Unavailable


@both
def test_an_answer_that_takes_longer_than_its_timeout_ends_and_is_cancelled(
    server: InferenceServer, collect: Collect
) -> None:
    server.script = then_waits("first")
    texts, error = collect(server.url, text="x", timeout_s=2.5)
    assert type(error) is TimedOut and texts == ["first"]
    assert server.cancelled.acquire(timeout=PATIENCE_S)


@both
@pytest.mark.parametrize(("texts", "kind"), [((), Unavailable), (("first",), BrokenOff)])
def test_a_server_that_has_fallen_silent_ends_the_wait(
    server: InferenceServer, collect: Collect, texts: tuple[str, ...], kind: type[ClientError]
) -> None:
    server.script = then_waits(*texts, answers_probes=False)
    came, error = collect(server.url, text="x", client={"silence_s": 0.2})
    assert type(error) is kind and "silent" in str(error)
    assert came == list(texts) and server.refused_probes == 1
    assert server.cancelled.acquire(timeout=PATIENCE_S)


@both
def test_a_server_that_lives_may_think_as_long_as_it_likes(server: InferenceServer, collect: Collect) -> None:
    def slow(request: Any, context: Any, server: InferenceServer) -> Iterator[Any]:
        waited = threading.Event()
        while server.probes < 3 and not server.stopping.is_set():
            waited.wait(0.05)
        yield from pieces("late")(request, context, server)

    server.script = slow
    assert collect(server.url, text="x", client={"silence_s": 0.2}) == (["late"], None)


# ── leaving ──────────────────────────────────────────────────────────────────────────────────────────────────────


def by_cancel(client: Client) -> None:
    stream = client.stream("x")
    next(stream)
    stream.cancel()
    with pytest.raises(Cancelled):
        next(stream)


def by_with(client: Client) -> None:
    with client.stream("x") as stream:
        next(stream)


def by_break(client: Client) -> None:
    for _ in client.stream("x"):
        break


def by_exception(client: Client) -> None:
    with pytest.raises(ZeroDivisionError):
        for _ in client.stream("x"):
            raise ZeroDivisionError


def by_forgetting(client: Client) -> None:
    next(client.stream("x"))


def by_close_of_the_client(client: Client) -> None:
    stream = client.stream("x")
    next(stream)
    client.close()
    with pytest.raises(Cancelled):
        next(stream)


@pytest.mark.parametrize("leave", [by_cancel, by_with, by_break, by_exception, by_forgetting, by_close_of_the_client])
def test_who_leaves_cancels(server: InferenceServer, leave: Callable[[Client], None]) -> None:
    server.script = then_waits("first")
    with Client(server.url) as client:
        leave(client)
        gc.collect()
        assert server.cancelled.acquire(timeout=PATIENCE_S)


def test_a_cancel_from_another_thread_wakes_the_reader(server: InferenceServer) -> None:
    server.script = then_waits("first")
    with Client(server.url) as client:
        stream = client.stream("x")
        next(stream)
        timer = threading.Timer(0.1, stream.cancel)
        timer.start()
        with pytest.raises(Cancelled):
            next(stream)
        timer.join()
        assert server.cancelled.acquire(timeout=PATIENCE_S)


def test_ctrl_c_in_the_wait_for_a_piece_cancels(server: InferenceServer) -> None:
    server.script = then_waits("first")
    with Client(server.url) as client:
        stream = client.stream("x")
        next(stream)
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            next(stream)
        timer.join()
        assert server.cancelled.acquire(timeout=PATIENCE_S)


def test_leaving_after_the_last_piece_cancels_nothing(server: InferenceServer) -> None:
    cancelled: list[bool] = []

    def script(request: Any, context: Any, server: InferenceServer) -> Iterator[Any]:
        gone = threading.Event()
        context.add_callback(gone.set)
        yield from pieces("a", "b")(request, context, server)
        cancelled.append(gone.wait(0.2))  # the end of the call comes somewhat after the final response

    server.script = script
    with Client(server.url) as client:
        for piece in client.stream("x"):
            if piece.finish_reason is not None:
                break
    assert cancelled == [False]


async def test_leaving_after_the_last_piece_cancels_nothing_in_asyncio(server: InferenceServer) -> None:
    cancelled: list[bool] = []

    def script(request: Any, context: Any, server: InferenceServer) -> Iterator[Any]:
        gone = threading.Event()
        context.add_callback(gone.set)
        yield from pieces("a", "b")(request, context, server)
        cancelled.append(gone.wait(0.2))

    server.script = script
    async with AsyncClient(server.url) as client, client.stream("x") as stream:
        async for piece in stream:
            if piece.finish_reason is not None:
                break
    assert cancelled == [False]


async def test_tasks_that_leave_cancel(server: InferenceServer) -> None:
    server.script = then_waits("first")
    async with AsyncClient(server.url) as client:
        got = asyncio.Event()

        async def read() -> None:
            async for _ in client.stream("x"):
                got.set()

        task = asyncio.create_task(read())
        await got.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.cancelled.acquire, timeout=PATIENCE_S)

        async for _ in client.stream("x"):
            break
        assert await asyncio.to_thread(server.cancelled.acquire, timeout=PATIENCE_S)

        with pytest.raises(ZeroDivisionError):
            async for _ in client.stream("x"):
                raise ZeroDivisionError
        assert await asyncio.to_thread(server.cancelled.acquire, timeout=PATIENCE_S)

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.generate("x"), 1.0)
        assert await asyncio.to_thread(server.cancelled.acquire, timeout=PATIENCE_S)

        async with client.stream("x") as stream:
            await anext(stream)
        with pytest.raises(Cancelled):
            await anext(stream)
        assert await asyncio.to_thread(server.cancelled.acquire, timeout=PATIENCE_S)


async def test_a_cancel_by_another_task_or_the_clients_close_wakes_the_reader(server: InferenceServer) -> None:
    server.script = then_waits("first")
    async with AsyncClient(server.url) as client:
        for end in ("cancel", "close"):
            stream = client.stream("x")
            await anext(stream)
            reader = asyncio.create_task(drain(stream))
            await asyncio.sleep(0)
            if end == "cancel":
                stream.cancel()
            else:
                await client.close()
            with pytest.raises(Cancelled):
                await reader
            assert await asyncio.to_thread(server.cancelled.acquire, timeout=PATIENCE_S)
        with pytest.raises(Cancelled, match="closed"):
            client.stream("x")


async def drain(stream: AsyncIterator[Any]) -> None:
    async for _ in stream:
        pass


# ── many, slow, forgotten ────────────────────────────────────────────────────────────────────────────────────────


async def test_many_requests_at_once_on_one_client_each_have_their_own_fate(server: InferenceServer) -> None:
    def script(request: Any, context: Any, server: InferenceServer) -> Iterator[Any]:
        text = inputs_of(request)["text_input"]
        if text.endswith("7"):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"text_input: {text}")
        yield from pieces(text, "!")(request, context, server)

    server.script = script
    async with AsyncClient(server.url) as client:
        outcomes = await asyncio.gather(*(client.generate(str(n)) for n in range(100)), return_exceptions=True)
    for number, outcome in enumerate(outcomes):
        if number % 10 == 7:
            assert isinstance(outcome, RequestRefused) and str(outcome) == f"text_input: {number}"
        else:
            assert isinstance(outcome, Answer) and outcome.text == f"{number}!"


def test_threads_share_a_client(server: InferenceServer) -> None:
    texts: list[str] = []
    with Client(server.url) as client:

        def ask() -> None:
            texts.append("".join(piece.text for piece in client.stream("x")))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == ["Paris é"] * 8


def test_who_reads_slowly_holds_up_the_sender_and_nobody_else(server: InferenceServer) -> None:
    stalled = threading.Event()

    def endless(request: Any, context: Any, server: InferenceServer) -> Iterator[Any]:
        if inputs_of(request)["text_input"] == "quick":
            yield from pieces("a", "b")(request, context, server)
            return
        while context.is_active() and server.sent < 20_000:
            server.sent += 1
            if server.sent == 16:
                stalled.set()
            yield response(final=False, text_output=["x" * 10_000], finish_reason=["None"])

    server.script = endless
    with Client(server.url) as client:
        slow = client.stream("slow")
        next(slow)
        assert stalled.wait(PATIENCE_S)
        for _ in range(20):  # round trips, in which an unbounded buffer would fill
            assert client.generate("quick").text == "ab"
        assert server.sent < 2_000, "20 MB are on their way to somebody who has read 10 kB"
        slow.cancel()


@pytest.mark.slow
@pytest.mark.parametrize(
    "left_open",
    [
        "client = Client(url); stream = client.stream('x'); next(stream)",
        "clients = [Client(url) for _ in range(3)]; streams = [c.stream('x') for c in clients]; next(streams[0])",
        "asyncio.run(forget())",
        "loop = asyncio.new_event_loop(); loop.run_until_complete(forget())",
    ],
)
def test_a_forgotten_close_does_not_keep_the_process(server: InferenceServer, left_open: str) -> None:
    server.script = then_waits("first")
    program = f"""
        import asyncio, sys
        from minisgl_client.aio import AsyncClient
        from minisgl_client.client import Client
        url, kept = sys.argv[1], []

        async def forget():
            client = AsyncClient(url)
            stream = client.stream("x")
            await anext(stream)
            kept.extend([client, stream])

        {left_open}
        print("at the end", flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (0, "at the end\n"), done.stderr
    assert done.stderr == ""
    assert server.cancelled.acquire(timeout=PATIENCE_S)


def test_a_client_without_a_loop_says_so() -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        AsyncClient("127.0.0.1:1")
