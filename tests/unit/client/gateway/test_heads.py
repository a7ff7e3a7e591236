"""The head of a request is bounded, before anybody looks at it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn import Config
from uvicorn.server import ServerState

from minisgl_client.gateway.heads import HEAD_S, MAX_CONNECTIONS, MAX_HEAD_BYTES, BoundedHeads

PART = 16 << 10
POST = b"POST / HTTP/1.1\r\nhost: a\r\n"


class Wire(asyncio.Transport):
    """What a connection writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: Any, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Loop:
    """The running one, with a clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._timers: list[tuple[float, asyncio.TimerHandle]] = []
        self.create_task = asyncio.get_running_loop().create_task

    def call_later(self, delay_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(self.now_s + delay_s, call, (), asyncio.get_running_loop())
        self._timers.append((self.now_s + delay_s, timer))
        return timer

    def passes(self, seconds: float) -> None:
        self.now_s += seconds
        due = [timer for when_s, timer in self._timers if when_s <= self.now_s]
        self._timers = [one for one in self._timers if one[0] > self.now_s]
        for timer in due:
            if not timer.cancelled():
                timer._run()


class Connection:
    """One, of a gateway whose application tells how large a body was."""

    def __init__(self, others: int = 0, *, reads: bool = True) -> None:
        """others: connections that are there already. reads: the application asks for the body."""
        self._reads = reads
        config = Config(self.app, http=BoundedHeads, interface="asgi3", lifespan="off", log_config=None)
        config.load()
        self.wire = Wire()
        self.state = ServerState()
        self.state.connections = cast("set[Any]", set(range(others)))
        self.loop = Loop()
        clock = cast("asyncio.AbstractEventLoop", self.loop)
        self.protocol = BoundedHeads(config=config, server_state=self.state, app_state={}, _loop=clock)
        self.protocol.connection_made(self.wire)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        size, more = 0, self._reads
        while more:
            message = await receive()
            size, more = size + len(message.get("body", b"")), message.get("more_body", False)
        told = b"%d bytes" % size
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(told))]})
        await send({"type": "http.response.body", "body": told})

    def sends(self, data: bytes, most: int) -> int:
        """Again and again, as long as it is heard. Returns how often."""
        for sent in range(most):
            if self.wire.closed:
                return sent
            self.protocol.data_received(data)
        return most

    async def answered(self) -> bytes:
        while self.state.tasks:
            await asyncio.gather(*self.state.tasks)
        return self.wire.written


@pytest.mark.parametrize(
    "begun", [b"GET /", POST + b"x-a: ", POST], ids=["a URL", "the value of a header", "any number of headers"]
)
async def test_a_head_without_an_end_is_refused(begun: bytes) -> None:
    connection = Connection()
    connection.protocol.data_received(begun)
    part = b"x-b: 1\r\n" * (PART // 8) if begun is POST else b"a" * PART
    assert connection.sends(part, 100) <= MAX_HEAD_BYTES // PART + 1
    assert connection.wire.written.startswith(b"HTTP/1.1 400 ") and not connection.state.tasks


async def test_trailers_without_an_end_end_the_connection() -> None:
    connection = Connection()
    connection.protocol.data_received(POST + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx-a: ")
    assert connection.sends(b"a" * PART, 100) <= MAX_HEAD_BYTES // PART + 1
    connection.protocol.connection_lost(None)
    await connection.answered()


@pytest.mark.parametrize("chunk", [b"1\r\na\r\n", b"4000\r\n" + b"a" * PART + b"\r\n"], ids=["one byte", "large"])
async def test_a_body_does_not_count_however_small_its_chunks_are(chunk: bytes) -> None:
    connection = Connection()
    connection.protocol.data_received(POST + b"transfer-encoding: chunked\r\n\r\n")
    count = 2 * MAX_HEAD_BYTES
    parts = chunk * 1024 if len(chunk) < 10 else chunk
    times = count // 1024 if len(chunk) < 10 else count // PART
    assert connection.sends(parts, times) == times
    connection.protocol.data_received(b"0\r\n\r\n")
    assert b"\r\n\r\n%d bytes" % count in await connection.answered()


async def test_each_request_of_a_connection_has_a_head_of_its_own() -> None:
    connection = Connection()
    head = POST + b"x-a: " + b"a" * (MAX_HEAD_BYTES // 2) + b"\r\ncontent-length: 0\r\n\r\n"
    for _ in range(4):
        for at in range(0, len(head), PART):
            connection.protocol.data_received(head[at : at + PART])
        await connection.answered()
    assert connection.wire.written.count(b"HTTP/1.1 200 ") == 4 and not connection.wire.closed


@pytest.mark.parametrize(
    ("begun", "more"), [(b"", b""), (b"\r\n", b"\r\n"), (POST, b"x: 1\r\n"), (b"GET /", b"a")],
    ids=["nothing", "empty lines", "any number of headers", "a URL"],
)  # fmt: skip
async def test_a_head_that_is_not_whole_in_time_is_refused_however_often_something_comes(
    begun: bytes, more: bytes
) -> None:
    connection = Connection()
    for sent in (begun, more, more, more):
        if sent:
            connection.protocol.data_received(sent)
        assert not connection.wire.closed
        connection.loop.passes(HEAD_S / 4)
    assert connection.wire.closed and connection.wire.written.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b'"code":"too_slow"' in connection.wire.written and not connection.state.tasks


async def test_an_answer_may_take_longer_than_a_head_and_the_next_head_has_its_own_time() -> None:
    connection = Connection()
    for answers in (1, 2):
        connection.protocol.data_received(POST + b"content-length: 1\r\n")
        connection.loop.passes(HEAD_S * 0.9)
        connection.protocol.data_received(b"\r\n")
        connection.loop.passes(HEAD_S * 9)
        connection.protocol.data_received(b"a")
        assert (await connection.answered()).count(b"HTTP/1.1 200 ") == answers and not connection.wire.closed


async def test_a_body_that_nobody_reads_does_not_hold_its_connection() -> None:
    connection = Connection(reads=False)
    connection.protocol.data_received(POST + b"content-length: 1000\r\n\r\n")
    await connection.answered()
    for _ in range(4):
        connection.protocol.data_received(b"a")
        assert not connection.wire.closed
        connection.loop.passes(HEAD_S / 4)
    assert connection.wire.closed


async def test_a_connection_that_ends_leaves_no_timer() -> None:
    connection = Connection()
    connection.protocol.connection_lost(None)
    connection.loop.passes(HEAD_S)
    assert not connection.wire.written


async def test_connections_are_of_a_bounded_number() -> None:
    assert not Connection(MAX_CONNECTIONS - 1).wire.closed
    connection = Connection(MAX_CONNECTIONS)
    connection.protocol.data_received(POST + b"\r\n")
    assert connection.wire.closed and connection.wire.written.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert not connection.state.tasks
