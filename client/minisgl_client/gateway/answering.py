"""An answer on its way: pieces from a back end, as one JSON object or as server-sent events, for as long as somebody
is there to read it.

A client that leaves is seen in ASGI's `receive`, also while nothing has been sent to it. Its requests are then
cancelled, and the engine stops computing for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Iterable
from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope, Send

from minisgl_client.gateway.backends import Backend
from minisgl_client.gateway.errors import ApiError
from minisgl_client.gateway.mapping import Plan
from minisgl_client.gateway.replies import Reply
from minisgl_client.pieces import Piece

Facts = dict[str, Any]
"""What the log tells of a request; the request's own task writes it."""

_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # for a proxy that would collect it
)


class Answering:
    """The response to one request, as an ASGI application."""

    def __init__(self, plan: Plan, reply: Reply, backend: Backend, id: str, facts: Facts) -> None:
        self._plan = plan
        self._reply = reply
        self._backend = backend
        self._id = id
        self._facts = facts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError when no word of the answer came."""
        try:
            await _unless_gone(receive, self._answer(send))
        except _Gone:
            self._facts["status"] = 499  # as others log it; nobody reads it
        finally:
            usage = self._reply.usage()
            self._facts["in"] = usage["prompt_tokens"]
            self._facts["cached"] = usage["prompt_tokens_details"]["cached_tokens"]
            self._facts["out"] = usage["completion_tokens"]
            self._facts["finish"] = ",".join(reason or "none" for reason in self._reply.finish_reasons)

    async def _answer(self, send: Send) -> None:
        async with contextlib.aclosing(self._backend.pieces(self._plan, self._id)) as pieces:
            if self._plan.stream:
                await self._stream(pieces, send)
            else:
                await self._whole(pieces, send)

    async def _whole(self, pieces: AsyncGenerator[tuple[int, Piece], None], send: Send) -> None:
        """Each prompt's answers come in one piece."""
        by_prompt = {prompt: piece async for prompt, piece in pieces}
        body = msgspec.json.encode(self._reply.whole([by_prompt[place] for place in range(len(self._plan.prompts))]))
        await send(_start(((b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)))))
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, pieces: AsyncGenerator[tuple[int, Piece], None], send: Send) -> None:
        """An error before the first piece is a status; after it an event, and no [DONE] follows."""
        first = await anext(pieces)
        await send(_start(_STREAM_HEADERS))
        try:
            await send(_part(_events(self._reply.opening()) + _events(self._reply.chunks(*first))))
            async for prompt, piece in pieces:
                if events := _events(self._reply.chunks(prompt, piece)):
                    await send(_part(events))
            end = _events(self._reply.closing()) + b"data: [DONE]\n\n"
        except ApiError as broken:
            self._facts["error"] = broken.code
            end = _events([broken.body()])
        await send({"type": "http.response.body", "body": end})


class _Gone(Exception):
    """The client has left."""


async def _unless_gone(receive: Receive, answer: Coroutine[Any, Any, None]) -> None:
    """Answers to the end, or until the client leaves; then the answer is cancelled. Raises _Gone."""
    answering = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise _Gone
        await answering
    finally:
        for task in (answering, leaving):
            task.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _start(headers: Iterable[tuple[bytes, bytes]]) -> Message:
    return {"type": "http.response.start", "status": 200, "headers": list(headers)}


def _part(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


def _events(objects: Iterable[Any]) -> bytes:
    return b"".join(b"data: %b\n\n" % msgspec.json.encode(one) for one in objects)
