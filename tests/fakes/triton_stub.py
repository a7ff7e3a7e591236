"""Triton's Python stub as a fake that is stricter than the real one: what crashes or hangs a server is recorded in
`violations` here, also when the code under test swallows the exception. Tests end with `assert not stub.violations`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

FINAL = 1
WAIT_S = 60.0  # of every wait below; reached only by a failing test


class TritonModelException(Exception):
    """As in the stub."""


class TritonError:
    """As in the stub: a message and a code."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self.message = message
        self.code = code


class Tensor:
    """A named array."""

    def __init__(self, name: str, array: Any) -> None:
        self._name = name
        self._array = array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        if isinstance(self._array, Exception):
            raise self._array
        return self._array


class InferenceResponse:
    """Output tensors or an error."""

    def __init__(self, output_tensors: list[Tensor], error: TritonError | None = None) -> None:
        self.tensors = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}
        self.error = error


class Log:
    """Collects lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def log_info(self, message: str) -> None:
        self.lines.append(f"info {message}")

    def log_warn(self, message: str) -> None:
        self.lines.append(f"warn {message}")

    def log_error(self, message: str) -> None:
        self.lines.append(f"error {message}")

    def with_level(self, level: str) -> list[str]:
        return [line for line in self.lines if line.startswith(level)]


class FakeStub:
    """Stands for the module `triton_python_backend_utils`."""

    Tensor = Tensor
    InferenceResponse = InferenceResponse
    TritonModelException = TritonModelException
    TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL

    def __init__(self, model: str = "minisgl", *, decoupled: bool = True) -> None:
        """Of this model, which may send many responses to a request, or one."""
        self.model = model
        self.decoupled = decoupled
        self.declared: Any = TENSORRT_DECLARED if model == "ensemble" else DECLARED
        self.TritonError: Any = TritonError
        self.Logger = Log()
        self.violations: list[str] = []
        self.lookup_says = "Model minisgl - Error when running inference: Model minisgl is using the decoupled. […]"
        self.lookups = 0

    def InferenceRequest(self, **fields: Any) -> Lookup:  # noqa: N802
        """Only what the bridge asks for: a lookup of its own model, see `minisgl_backend.serving.presence`."""
        wanted = fields.pop("requested_output_names")
        assert fields == {"model_name": self.model, "model_version": 1, "inputs": []}
        assert (wanted == []) is self.decoupled, "else the model is run, and does not refuse"
        self.lookups += 1
        return Lookup(self.lookup_says)


@dataclass(frozen=True)
class Lookup:
    """A BLS request that is refused, its response and its error in one."""

    says: str

    def exec(self) -> Lookup:
        return self

    def has_error(self) -> bool:
        return True

    def error(self) -> Lookup:
        return self

    def message(self) -> str:
        return self.says


DECLARED: dict[str, tuple[Any, int | None]] = {
    "text_output": (np.object_, None),
    "finish_reason": (np.object_, None),
    "num_input_tokens": (np.uint32, 1),
    "num_output_tokens": (np.uint32, None),
    "output_ids": (np.int32, None),
    "num_cached_tokens": (np.uint32, 1),
    "ttft_ms": (np.float32, 1),
    "queue_ms": (np.float32, 1),
    "cumulative_logprob": (np.float32, None),
    "logprobs": (np.object_, None),
    "prompt_logprobs": (np.object_, 1),
    "prompt_token_ids": (np.int32, None),
    "reasoning_output": (np.object_, None),
    "tool_calls": (np.object_, None),
    "result": (np.object_, 1),
}
"""Outputs that config.pbtxt declares: dtype, and size where it is not -1."""

TENSORRT_DECLARED: dict[str, tuple[Any, Any]] = {
    "text_output": (np.object_, 1),
    "cum_log_probs": (np.float32, (1, 1)),
    "output_log_probs": (np.float32, (1, 1, None)),
    "batch_index": (np.int32, (1, 1)),
    "sequence_index": (np.int32, (1, 1)),
    "num_input_tokens": (np.int32, (1, 1)),
    "num_output_tokens": (np.int32, (1, 1)),
}
"""Those of `ensemble`, with TensorRT-LLM's shapes; None: any size."""


@dataclass
class Answer:
    """One response as the client gets it. `more`: its outputs beside text and reason; of several answers all."""

    text: str | None
    reason: str | None
    error: str | None
    code: int | None
    final: bool
    more: dict[str, list[Any]] = field(default_factory=dict)


class FakeSender:
    """The response sender of one request. Public fields belong to the test."""

    def __init__(self, stub: FakeStub) -> None:
        self._stub = stub
        self._changed = threading.Condition()
        self._inside = threading.Lock()
        self._user: int | None = None
        self.answers: list[Answer] = []
        self.finals = 0
        self.polls = 0
        self.cancelled = False
        self.refuse_next = 0  # this many sends raise, and nothing is sent
        self.room_chars: int | None = None  # of shared memory: a longer text raises, and nothing is sent
        self.on_poll: Any = None  # called with no arguments when asked is_cancelled
        self._closed = False
        self._held = False
        self._blocked = False

    # ── the stub's interface ─────────────────────────────────────────────────────────────────────────────────────

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        with self._one_thread("send"):
            if self.finals:
                self._violation("send after FINAL")
            if self._closed:
                raise TritonModelException("Unable to send response. Response sender has been closed.")
            self._closed = flags == FINAL  # as the stub: before the response is copied, which may fail
            with self._changed:
                self._blocked = self._held
                self._changed.notify_all()
                self._wait(lambda: not self._held)
                self._blocked = False
            if self.refuse_next:
                self.refuse_next -= 1
                raise TritonModelException("Failed to increase the shared memory pool size")
            if not self._stub.decoupled and (response is None) is not bool(self.answers):
                raise TritonModelException(
                    "A model that is not decoupled sends one response, and FINAL with or after it."
                )
            answer = self._read(response, flags == FINAL)
            if self.room_chars is not None and len(answer.text or "") > self.room_chars:
                raise TritonModelException("Failed to increase the shared memory pool size")
            with self._changed:
                self.answers.append(answer)
                self.finals += answer.final
                self._changed.notify_all()

    def is_cancelled(self) -> bool:
        with self._one_thread("is_cancelled"):
            if self.finals:
                self._violation("is_cancelled after FINAL: the real server dies here")
            with self._changed:
                self.polls += 1
                self._changed.notify_all()
            if self.on_poll is not None:
                self.on_poll()
            return self.cancelled

    # ── the test's side ──────────────────────────────────────────────────────────────────────────────────────────

    def hold(self) -> None:
        """Makes sends block until `release`."""
        with self._changed:
            self._held = True

    def release(self) -> None:
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def wait_blocked(self) -> None:
        """Until a send waits for `release`."""
        with self._changed:
            self._wait(lambda: self._blocked)

    def wait_final(self) -> FakeSender:
        with self._changed:
            self._wait(lambda: self.finals > 0)
        return self

    def wait_answers(self, count: int) -> None:
        with self._changed:
            self._wait(lambda: len(self.answers) >= count)

    def wait_polls(self, count: int) -> None:
        with self._changed:
            self._wait(lambda: self.polls >= count)

    @property
    def text(self) -> str:
        return "".join(answer.text or "" for answer in self.answers)

    def _wait(self, condition: Any) -> None:
        assert self._changed.wait_for(condition, WAIT_S), "waited in vain"

    def _one_thread(self, what: str) -> threading.Lock:
        me = threading.get_ident()
        if self._user not in (None, me) or self._inside.locked():
            self._violation(f"a second thread on one sender: {what}")
        self._user = me
        return self._inside

    def _violation(self, line: str) -> None:
        self._stub.violations.append(line)

    def _read(self, response: InferenceResponse | None, final: bool) -> Answer:
        if response is None or response.error is not None:
            error = None if response is None else response.error
            return Answer(None, None, error and error.message, error and error.code, final)
        for name, array in response.tensors.items():
            dtype, size = self._stub.declared.get(name, (None, None))
            shape = size if isinstance(size, tuple) else (size,)
            fits = len(shape) == array.ndim and all(a in (None, b) for a, b in zip(shape, array.shape, strict=True))
            if array.dtype != dtype or not fits:
                self._violation(f"output {name} is not as declared: {array!r}")
        more = {name: self._values(name, array) for name, array in response.tensors.items()}
        single = [
            more.pop(name)[0] if len(more.get(name, ())) == 1 else None for name in ("text_output", "finish_reason")
        ]
        return Answer(*single, None, None, final, more)

    def _values(self, name: str, array: Any) -> list[Any]:
        if array.dtype != np.object_:
            return list(array.tolist())
        if not all(isinstance(value, bytes) for value in array):
            self._violation(f"output {name} is not of BYTES: {array!r}")
        return [bytes(value).decode("utf-8") for value in array]


def strings(*values: Any, shape: tuple[int, ...] | None = None) -> Any:
    """A BYTES tensor's array."""
    array = np.empty(len(values), dtype=np.object_)
    array[:] = values
    return array if shape is None else array.reshape(shape)


@dataclass
class FakeRequest:
    """A request as Triton hands it to `execute`."""

    sender: FakeSender
    tensors: dict[str, Any]
    params: Mapping[str, Any] | str = field(default_factory=dict)
    id: str = ""
    correlation: Any = 0
    sequence_flags: int = 0
    timeout_us: int = 0

    def inputs(self) -> list[Tensor]:
        return [Tensor(name, array) for name, array in self.tensors.items()]

    def parameters(self) -> str:
        return self.params if isinstance(self.params, str) else json.dumps(self.params)

    def request_id(self) -> str:
        return self.id

    def correlation_id(self) -> Any:
        return self.correlation

    def flags(self) -> int:
        return self.sequence_flags

    def timeout(self) -> int:
        return self.timeout_us

    def get_response_sender(self) -> FakeSender:
        return self.sender


def request(stub: FakeStub, prompt: Any = b"hello", *, stream: bool | None = None, **fields: Any) -> FakeRequest:
    """A request for one prompt. `tensors` in `fields` adds inputs or replaces them (None takes one away)."""
    tensors: dict[str, Any] = {"text_input": strings(prompt)}
    if stream is not None:
        tensors["stream"] = np.array([stream])
    tensors.update(fields.pop("tensors", {}))
    given = {name: array for name, array in tensors.items() if array is not None}
    return FakeRequest(FakeSender(stub), given, **fields)
