"""Streams of OpenAI's API over plain sockets: a client so light that a benchmark tells the gateway's cost, not its own.

One request a connection, which ends with the answer.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

_DONE = b"[DONE]"


class BadAnswer(Exception):
    """What came instead of a whole stream."""


@dataclass
class Heard:
    """One stream. `times_s` has an element for each event that brought text, by time.perf_counter."""

    times_s: list[float] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)

    def take(self, text: str) -> None:
        if text:
            self.times_s.append(time.perf_counter())
            self.parts.append(text)

    @property
    def text(self) -> str:
        return "".join(self.parts)


class EventStream(asyncio.Protocol):
    """An open stream. Await `begun` for its first event and `ended` for the last. Both raise BadAnswer."""

    def __init__(self, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        self.heard = Heard()
        self.begun: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._request = request
        self._rest = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Events are cut at their blank lines; the sizes of HTTP's chunks stand between them and are passed over."""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            _, _, told = event.partition(b"data: ")
            if told == _DONE:
                _settle(self.ended, None)
            elif told:
                self._take(told)

    def connection_lost(self, error: Exception | None) -> None:
        broken = BadAnswer(f"the stream ended early: {error or self._rest[:400]!r}")
        _settle(self.begun, broken)
        _settle(self.ended, broken)

    def close(self) -> None:
        """Leaves, at whatever place."""
        for future in (self.begun, self.ended):
            future.cancel()
        if self._transport is not None:
            self._transport.abort()

    def _take(self, told: bytes) -> None:
        chunk = msgspec.json.decode(told)
        if "error" in chunk:
            _settle(self.ended, BadAnswer(str(chunk["error"])))
            return
        for choice in chunk["choices"]:
            self.heard.take(choice["text"])
        _settle(self.begun, None)


async def open_stream(url: str, **body: Any) -> EventStream:
    """Sends a POST to /v1/completions with stream true. url: of the API, as in `minisgl gateway`'s first line."""
    where = urlsplit(url)
    raw = msgspec.json.encode({**body, "stream": True})
    head = (
        f"POST {where.path}/completions HTTP/1.1\r\nHost: {where.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    loop, made = asyncio.get_running_loop(), head.encode() + raw
    _, stream = await loop.create_connection(lambda: EventStream(made), where.hostname or "", where.port or 80)
    return stream


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
        future.exception()  # nobody may be waiting for it
