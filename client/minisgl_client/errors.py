"""Every error of a request, as its client sees it. The commands turn them into exit codes.

    ClientError
    ├── RequestRefused   the request as it is can not be served: a field out of range, an unknown model
    ├── Unsupported      it asks for something that this server does not do
    ├── Unavailable      no word of an answer came: no connection, a full queue, an engine that starts. Ask again.
    ├── BrokenOff        an answer had begun when the engine, the server or the connection died
    ├── TimedOut         `timeout_s` passed, or `deadline_ms` on the server
    ├── Cancelled        the request was cancelled, here or by the server
    └── ServerFault      the server failed at this request, or sent what we do not understand

Messages are the server's own words where it has spoken. Nothing is ever sent again on its own.
"""

from __future__ import annotations


class ClientError(Exception):
    """Root of the tree. `status` is the name of the gRPC status, e.g. INVALID_ARGUMENT."""

    def __init__(self, message: str, status: str) -> None:
        super().__init__(message)
        self.status = status


class RequestRefused(ClientError):
    """Change the request: the message starts with the field."""

    def __init__(self, message: str, status: str = "INVALID_ARGUMENT") -> None:
        super().__init__(message, status)


class Unsupported(ClientError):
    """A feature that this server knows and does not have."""

    def __init__(self, message: str, status: str = "UNIMPLEMENTED") -> None:
        super().__init__(message, status)


class Unavailable(ClientError):
    """Nothing of an answer came. The same request may succeed later."""

    def __init__(self, message: str, status: str = "UNAVAILABLE") -> None:
        super().__init__(message, status)


class BrokenOff(ClientError):
    """The pieces that came are a true beginning of the answer, and no more will come."""

    def __init__(self, message: str, status: str = "UNAVAILABLE") -> None:
        super().__init__(message, status)


class TimedOut(ClientError):
    """The answer was not complete in time; its request was cancelled."""

    def __init__(self, message: str, status: str = "DEADLINE_EXCEEDED") -> None:
        super().__init__(message, status)


class Cancelled(ClientError):
    """Nobody waits for this answer any more."""

    def __init__(self, message: str = "the request was cancelled", status: str = "CANCELLED") -> None:
        super().__init__(message, status)


class ServerFault(ClientError):
    """Not the request's fault, as far as is known."""

    def __init__(self, message: str, status: str = "INTERNAL") -> None:
        super().__init__(message, status)


def error_of_status(status: str, message: str, *, begun: bool) -> ClientError:
    """The error of a call that ended with a gRPC status. begun: a piece of its answer had come."""
    if status == "UNAVAILABLE" and _DEADLINE_WORDS in message:  # Triton has no status of its own for it
        return TimedOut(message, status)
    if status == "UNAVAILABLE":
        return BrokenOff(message) if begun else Unavailable(message)
    return _BY_STATUS.get(status, ServerFault)(message, status)


def error_of_words(message: str) -> ClientError:
    """The error of a request that Triton itself turned away: it says so in words only, without a status."""
    if message.startswith("Request for unknown model"):
        if "no available versions" in message or "ready state" in message:
            return Unavailable(message)  # being loaded, or unloaded
        return RequestRefused(message, "NOT_FOUND")
    return RequestRefused(message)


_DEADLINE_WORDS = "deadline of this request passed"

_BY_STATUS: dict[str, type[ClientError]] = {
    "INVALID_ARGUMENT": RequestRefused,
    "NOT_FOUND": RequestRefused,
    "ALREADY_EXISTS": RequestRefused,
    "UNIMPLEMENTED": Unsupported,
    "DEADLINE_EXCEEDED": TimedOut,
    "CANCELLED": Cancelled,
}
