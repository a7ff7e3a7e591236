"""Requests that are no generations: they name an operation, and are answered with one JSON object.

Where it stands in the flow: the text actor asks `read_operation` for every request with an `operation`, before
anything else of it is read.
"""

from __future__ import annotations

import difflib

from minisgl_backend.errors import InvalidRequest
from minisgl_backend.messages.client import Request
from minisgl_backend.text.values import shown

ENGINE = "engine"
OPERATIONS = (ENGINE,)


def read_operation(request: Request) -> str:
    """Which one a request asks for. Raises InvalidRequest for what is none, and for fields that it does not read."""
    name = (request.operation or b"").decode("utf-8", "replace")
    if name not in OPERATIONS:
        close = difflib.get_close_matches(name[:64], OPERATIONS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise InvalidRequest("operation", f"must be one of {', '.join(OPERATIONS)}, got {shown(name)}{hint}")
    for field in ("text_input", "input_ids", "messages", "tools"):
        if getattr(request, field) is not None:
            raise _not_read(field, name)
    if request.parameters not in (b"", b"{}"):
        raise _not_read("sampling_parameters", name)
    return name


def _not_read(field: str, operation: str) -> InvalidRequest:
    return InvalidRequest(field, f"is not read by the operation {operation!r}")
