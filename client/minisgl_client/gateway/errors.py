"""Every answer of the gateway that is an error, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}.

Where it stands in the flow: the edge raises ApiError itself; what the engine refuses arrives as a ClientError and is
made one by `of_client_error`. Its message begins with the field at fault, by the name that the client knows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from minisgl_client.errors import (
    BrokenOff,
    Cancelled,
    ClientError,
    RequestRefused,
    TimedOut,
    Unavailable,
    Unsupported,
)

RETRY_AFTER_S = 1
_QUEUE_FULL = "the queue is full"  # the server's words: it has one status for all that may work later
_TOO_LONG = "the prompt is too long"  # LangChain and litellm know these words, too
_FIELD = re.compile(r"([a-z][a-z_]*)([.\[][^\s:]*)?: ")
_INVALID, _SERVER = "invalid_request_error", "server_error"


class ApiError(Exception):
    """One HTTP answer. kind: OpenAI's `type`. param: the field at fault. code: for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = _INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON of the answer, and of an event in a stream that has begun."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


def refused(param: str, problem: str, code: str | None = None) -> ApiError:
    """A request that must be changed."""
    return ApiError(400, f"{param}: {problem}", param=param, code=code)


def unknown_model(name: str) -> ApiError:
    """As OpenAI says it."""
    return ApiError(404, f"The model {name!r} does not exist", param="model", code="model_not_found")


def of_client_error(error: ClientError, names: Mapping[str, str]) -> ApiError:
    """names: the engine's field → the one that the client wrote, where they differ."""
    message, param = _renamed(str(error), names)
    if isinstance(error, RequestRefused) and error.status == "NOT_FOUND":
        return unknown_model_there(message)
    if isinstance(error, RequestRefused):
        return ApiError(400, message, param=param, code="context_length_exceeded" if _TOO_LONG in message else None)
    if isinstance(error, Unsupported):
        return ApiError(400, message, param=param, code="unsupported")
    later = {"Retry-After": str(RETRY_AFTER_S)}
    if isinstance(error, TimedOut):
        return ApiError(504, message, kind="timeout", code="timeout")
    if isinstance(error, Unavailable) and _QUEUE_FULL in message:
        return ApiError(429, message, kind="rate_limit_error", code="queue_full", headers=later)
    if isinstance(error, Unavailable | BrokenOff | Cancelled):
        return ApiError(503, message, kind=_SERVER, code="unavailable", headers=later)
    return ApiError(500, message, kind=_SERVER, code="server_fault")


def unknown_model_there(message: str) -> ApiError:
    """Triton does not have the model that the gateway asks for: nothing that the client can mend."""
    return ApiError(503, message, kind=_SERVER, code="unavailable", headers={"Retry-After": str(RETRY_AFTER_S)})


def _renamed(message: str, names: Mapping[str, str]) -> tuple[str, str | None]:
    found = _FIELD.match(message)
    if found is None:
        return message, None
    field, rest = found[1], found[2] or ""
    if field in names:
        field, rest = names[field], ""
    return f"{field}{rest}: {message[found.end() :]}", field + rest
