"""The client, for asyncio: as `client.py`, with `async with`, `async for` and `await`.

async with AsyncClient("127.0.0.1:8001") as client:
    async for piece in client.stream("The capital of France is", max_tokens=32):
        print(piece.text, end="", flush=True)
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from minisgl_client.errors import Cancelled, ServerFault
from minisgl_client.pieces import Answer, Piece
from minisgl_client.reception import HEADERS, PROBE_S, SILENCE_S, Reception, channel_options
from minisgl_client.requests import Request, RequestFields, encode, infer_method


class AsyncClient:
    """A connection to one server, for the tasks of the running loop, each with streams of its own.

    The arguments are `Client`'s. Close it, or use `async with`: what is open is cancelled. One that is forgotten is
    closed with its last reference.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str = "minisgl",
        credentials: grpc.ChannelCredentials | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        asyncio.get_running_loop()  # grpc would bind the channel to another one
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(url, channel_options(url))
        else:
            self._channel = grpc.aio.secure_channel(url, credentials, channel_options(url))
        self._model = model
        self._infer = infer_method(self._channel)
        self._pulse = _Pulse(service_pb2_grpc.GRPCInferenceServiceStub(self._channel).ServerLive, silence_s)
        self.closed = False  # by `close`: what was open is cancelled

    def stream(self, text: str | None = None, *, stream: bool = True, **fields: Unpack[RequestFields]) -> AsyncStream:
        """Sends a request and returns its pieces as they will come. Raises RequestRefused when it is none.

        stream: false asks for the whole answer in one piece.
        """
        return self._start(Request.of(text, stream, **fields))

    async def generate(self, text: str | None = None, **fields: Unpack[RequestFields]) -> Answer:
        """The whole answer, in one response. A cancel of this task cancels it."""
        async with self._start(Request.of(text, False, **fields)) as stream:
            return Answer.of([piece async for piece in stream])

    async def ask(self, operation: str, text: str | None = None, **fields: Any) -> Any:
        """What is no generation: the JSON object that the server tells. docs/client.md lists the operations."""
        async with self._start(Request.asking(operation, text, fields)) as stream:
            return await stream.told()

    async def close(self) -> None:
        """Cancels what is open and closes the connection. May be called more than once."""
        self.closed = True
        await self._channel.close()

    def _start(self, request: Request) -> AsyncStream:
        message = encode(request, self._model)
        if self.closed:
            raise Cancelled("the client is closed")
        call = self._infer(message, timeout=request.timeout_s, metadata=HEADERS)
        return AsyncStream(self, call, self._pulse)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.close()


class AsyncStream(AsyncIterator[Piece]):
    """The answer to one request. Iterating raises a ClientError when it is not to be had whole.

    The request is cancelled when its reader leaves before the end: by `cancel`, at the end of `async with`, with a
    cancel of the task that waits in `anext`, and with the last reference, which a plain `async for` drops as it ends.
    """

    def __init__(self, client: AsyncClient, call: Any, pulse: _Pulse) -> None:
        self._client = client  # so that it is not closed before us
        self._call = call
        self._pulse = pulse
        self._reception = Reception()
        self._silence = _Silence(self, pulse)
        self._left = False  # by `cancel`, or because the server is silent: the call is cancelled here

    async def __anext__(self) -> Piece:
        while not self._reception.over:
            piece = await self._receive()
            if piece is not None:
                return piece
        self._reception.result()
        raise StopAsyncIteration

    async def told(self) -> Any:
        """The result of an operation."""
        async for _ in self:
            raise ServerFault("the server answers an operation as if it were a generation")
        return self._reception.answer()

    def cancel(self) -> None:
        """Tells the server that nobody waits. Iterating then raises Cancelled, unless the end had come."""
        self._left = True
        self._silence.close()
        self._reception.cancelled()
        self._call.cancel()

    def fall_silent(self) -> None:
        """The server does not say that it lives: the stream ends with an error."""
        self._left = True
        self._reception.silent()
        self._call.cancel()

    def __del__(self) -> None:
        if not self._call.done():  # grpc's own call is held by tasks of its own until it ends
            self._call.cancel()

    async def _receive(self) -> Piece | None:
        """Reads in the reader's own task: a task for each piece was a fifth of what the gateway spends on one."""
        task = asyncio.current_task()
        cancels = task.cancelling() if task else 0
        self._silence.begins()
        try:
            response = await self._call.read()
        except asyncio.CancelledError:
            of_task = task is not None and task.cancelling() > cancels
            if of_task or not (self._left or self._client.closed):
                self.cancel()
                raise
            self._reception.cancelled()  # the call alone, by `cancel` or by the client's end
        except grpc.aio.AioRpcError as error:
            self._reception.failed(error.code().name, error.details() or "")
        else:
            return await self._take(response)
        finally:
            self._silence.ends()
        return None

    async def _take(self, response: Any) -> Piece | None:
        if response is grpc.aio.EOF:
            self._reception.closed()
            return None
        piece = self._reception.take(response)
        if self._reception.over:
            await self._drain()
        return piece

    async def _drain(self) -> None:
        """To the end of the call, which follows at once: then leaving after the last piece is no cancel."""
        try:
            async with asyncio.timeout(PROBE_S):
                await self._call.code()
        except TimeoutError:
            self._call.cancel()  # the answer is whole all the same

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.cancel()


class _Silence:
    """Watches how long a stream's reader waits, with one timer for all its pieces. Does not keep the stream alive."""

    def __init__(self, stream: AsyncStream, pulse: _Pulse) -> None:
        self._stream = weakref.ref(stream)
        self._pulse = pulse
        self._loop = asyncio.get_running_loop()
        self._waits_since: float | None = None  # by the loop's clock; None: nobody waits
        self._timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None

    def begins(self) -> None:
        """A reader waits."""
        self._waits_since = self._loop.time()
        if self._timer is None and self._asking is None:
            self._timer = self._loop.call_later(self._pulse.silence_s, self._look)

    def ends(self) -> None:
        """It does not any more."""
        self._waits_since = None

    def close(self) -> None:
        """Nobody will wait."""
        for pending in (self._timer, self._asking):
            if pending is not None:
                pending.cancel()

    def _look(self) -> None:
        self._timer = None
        if self._waits_since is None or self._stream() is None:
            return
        left_s = self._waits_since + self._pulse.silence_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
        else:
            self._asking = self._loop.create_task(self._ask())

    async def _ask(self) -> None:
        since = self._waits_since
        lives = await self._pulse.beats()
        self._asking = None
        stream = self._stream()
        if stream is not None and self._waits_since is not None:
            if lives or self._waits_since != since:  # or a piece came meanwhile
                self._timer = self._loop.call_later(self._pulse.silence_s, self._look)
            else:
                stream.fall_silent()


class _Pulse:
    """Whether the server lives, asked at most once per `silence_s` however many streams wait."""

    def __init__(self, ask: Any, silence_s: float) -> None:
        self.silence_s = silence_s
        self._ask = ask
        self._asking = asyncio.Lock()
        self._felt_at = -silence_s

    async def beats(self) -> bool:
        """Takes PROBE_S at most."""
        async with self._asking:
            if time.monotonic() - self._felt_at < self.silence_s:
                return True
            try:
                code = await self._ask(service_pb2.ServerLiveRequest(), timeout=PROBE_S).code()
            except grpc.aio.UsageError:  # the client has been closed
                return False
            if code is grpc.StatusCode.OK:
                self._felt_at = time.monotonic()
            return bool(code is grpc.StatusCode.OK)
