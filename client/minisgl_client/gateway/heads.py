"""Bounds for the head of a request, in bytes and in time, and for the number of connections. uvicorn has none of the
first two: a header without an end would fill the memory, and one that never comes hold its connection for ever, before
any key is looked at.

Where it stands in the flow: uvicorn makes one of these for each connection (`run.py`). Bodies have their bound in
app.py.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from minisgl_client.gateway.errors import ApiError

MAX_HEAD_BYTES = 64 << 10
"""Of the request's line and headers, and of the trailers; what comes with them in one read is not counted."""

_FRAMES = 16
"""Bytes on the wire for each one of a body, at most: chunks of one byte have some six."""


HEAD_S = 30.0
"""From the begin of a connection, or its last answer, until the next head is whole."""

MAX_CONNECTIONS = 4096
"""Fewer where the process may not open so many files: the others then wait until they are taken."""


class BoundedHeads(HttpToolsProtocol):
    """uvicorn's, which counts what is no body, and waits for no head longer than `HEAD_S`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._left_bytes = MAX_HEAD_BYTES
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """One too many is told so (503) and closed."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            message = f"there are {MAX_CONNECTIONS} connections already"
            self._refuse(ApiError(503, message, kind="server_error", code="unavailable"))
        else:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        self._head_is_here()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():  # else the next has begun
            self._wait_for_head()

    def on_message_begin(self) -> None:
        self._left_bytes = MAX_HEAD_BYTES
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        self._left_bytes += _FRAMES * len(body)
        super().on_body(body)

    def data_received(self, data: bytes) -> None:
        """Closes the connection of a head that is too large; one that has no answer yet is told so (400)."""
        if self.transport.is_closing():
            return
        self._left_bytes -= len(data)
        super().data_received(data)
        if self._left_bytes >= 0 or self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self.send_400_response(f"The head of a request must hold at most {MAX_HEAD_BYTES} bytes.")
        else:
            self.transport.close()

    def _wait_for_head(self) -> None:
        self._head_is_here()
        self._timer = self.loop.call_later(HEAD_S, self._give_up)

    def _head_is_here(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self._refuse(ApiError(408, f"the head of a request must come within {HEAD_S:g} s", code="too_slow"))

    def _refuse(self, error: ApiError) -> None:
        body = msgspec.json.encode(error.body())
        head = b"HTTP/1.1 %d %b\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(head % (error.status, HTTPStatus(error.status).phrase.encode(), len(body)) + body)
        self.transport.close()
