"""A bound for the head of a request. uvicorn has none: a header without an end would fill the memory, before any key is
looked at.

Where it stands in the flow: uvicorn makes one of these for each connection (`run.py`). Bodies have their bound in
app.py.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
"""Of the request's line and headers, and of the trailers; what comes with them in one read is not counted."""

_FRAMES = 16
"""Bytes on the wire for each one of a body, at most: chunks of one byte have some six."""


class BoundedHeads(HttpToolsProtocol):
    """uvicorn's, which counts what is no body."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._left_bytes = MAX_HEAD_BYTES

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
