"""Every error a user of the engine can meet, with the status the client sees.

    MinisglError
    ├── RequestError                  one request fails, nothing else does
    │   ├── InvalidRequest            INVALID_ARGUMENT  a field has a value outside its range
    │   ├── UnsupportedFeature        UNSUPPORTED       a known feature that this version refuses
    │   ├── QueueFull                 UNAVAILABLE       retry later: the waiting queue is at its limit
    │   ├── EngineUnavailable         UNAVAILABLE       retry later: the engine died or is (re)starting
    │   ├── DeadlineExceeded          UNAVAILABLE       the request's own deadline passed
    │   ├── RequestCancelled          CANCELLED         the client went away
    │   └── SequenceFailed            INTERNAL          this sequence alone could not be computed
    └── StartError                    the engine can not start; the message says what to change
        ├── ConfigError               a setting is unknown or out of range
        ├── ModelNotFound             no such folder, or a model that was never fetched
        └── ModelUnsupported          a folder we can read but must not or can not run

Messages name the field and the allowed range. They never carry a traceback or a path of the server, except
StartError, which speaks to the operator. Lowest room: imports nothing of ours.
"""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """The status of an answer. The names are Triton's own, so that the bridge maps them one to one."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    UNSUPPORTED = "UNSUPPORTED"
    UNAVAILABLE = "UNAVAILABLE"
    CANCELLED = "CANCELLED"
    INTERNAL = "INTERNAL"


class MinisglError(Exception):
    """Root of the tree. `status` is what a client sees when the error ends its request."""

    status: Status = Status.INTERNAL


class RequestError(MinisglError):
    """Ends one request and leaves every other one alone."""


class InvalidRequest(RequestError):
    """A field of the request is outside its range. The message starts with the field's name."""

    status = Status.INVALID_ARGUMENT

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class UnsupportedFeature(RequestError):
    """A feature that is known but not built: refused, never ignored."""

    status = Status.UNSUPPORTED

    def __init__(self, field: str, problem: str = "is not supported by this version") -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class QueueFull(RequestError):
    """The waiting queue is at its limit. Retryable."""

    status = Status.UNAVAILABLE


class EngineUnavailable(RequestError):
    """The engine died or is starting. Retryable."""

    status = Status.UNAVAILABLE


class DeadlineExceeded(RequestError):
    """The deadline of the request passed before its answer was complete. The status is Triton's own for a timeout."""

    status = Status.UNAVAILABLE


class RequestCancelled(RequestError):
    """The client cancelled or disconnected."""

    status = Status.CANCELLED


class SequenceFailed(RequestError):
    """The model gave no usable token for this sequence (for example non-finite logits)."""


class StartError(MinisglError):
    """The engine can not start. `exit_code` is what the command line returns."""

    exit_code = 2


class ConfigError(StartError):
    """A setting is unknown, has the wrong type, or is out of range."""


class ModelNotFound(StartError):
    """The model's folder does not exist, or the model was never fetched."""

    exit_code = 3


class ModelUnsupported(StartError):
    """The folder holds a model we refuse by rule (pickles, remote code) or can not run yet."""

    exit_code = 4


def error_of(status: Status, message: str) -> RequestError:
    """Rebuilds the error of an answer that crossed a process: same status, same message."""
    kind = _BY_STATUS[status]
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    return error


_BY_STATUS: dict[Status, type[RequestError]] = {
    Status.INVALID_ARGUMENT: InvalidRequest,
    Status.UNSUPPORTED: UnsupportedFeature,
    Status.UNAVAILABLE: EngineUnavailable,
    Status.CANCELLED: RequestCancelled,
    Status.INTERNAL: SequenceFailed,
}
