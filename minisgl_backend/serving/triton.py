"""What serving/ uses of Triton's Python stub (`triton_python_backend_utils`), as types.

Where it stands in the flow: `model.py` imports the stub, which exists only inside Triton's process, and hands the
module to the bridge as a `TritonStub`. Nothing of ours imports it, so everything here also runs against a fake.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Tensor(Protocol):
    """An input tensor. Its array may lie in shared memory that Triton frees with the request: copy what you keep."""

    def name(self) -> str: ...

    def as_numpy(self) -> Any: ...  # numpy array; BYTES tensors have dtype object and hold bytes


class ResponseSender(Protocol):
    """Sends the responses of one request. Both calls block for a round trip to the server (about 0.1 ms) and
    release the GIL. Two threads on one sender crash the server, and so does any call after FINAL but `send`.
    """

    def send(self, response: Any = None, flags: int = 0) -> None: ...

    def is_cancelled(self) -> bool: ...


class InferenceRequest(Protocol):
    """One request of an `execute` call."""

    def inputs(self) -> Sequence[Tensor]: ...

    def parameters(self) -> str: ...  # JSON object; values are bool, int, float or string

    def correlation_id(self) -> Any: ...  # int or str; 0 or "" without a sequence

    def flags(self) -> int: ...  # start and end of a sequence

    def timeout(self) -> int: ...  # microseconds; 0: none

    def get_response_sender(self) -> ResponseSender: ...


class Logger(Protocol):
    """Triton's log. A line costs a round trip of about 0.2 ms: never one per token."""

    def log_info(self, message: str) -> None: ...

    def log_warn(self, message: str) -> None: ...

    def log_error(self, message: str) -> None: ...


class TritonStub(Protocol):
    """The module itself."""

    Tensor: Any
    InferenceResponse: Any
    TritonError: Any
    TritonModelException: Any
    Logger: Any
    InferenceRequest: Any  # of BLS: a request to a model of the same server
    TRITONSERVER_RESPONSE_COMPLETE_FINAL: int


def load_error(stub: TritonStub, reason: Exception) -> Exception:
    """What `initialize` raises: its message goes to Triton's log and into the error of the load request.

    Triton would put file and line of our code behind the message; it handles the whole as a C string, which a zero
    byte ends.
    """
    error: Exception = stub.TritonModelException(f"{reason}\0")
    return error
