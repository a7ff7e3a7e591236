"""A call from one Triton model to another: business logic scripting (BLS), as far as it is safe.

Where it stands in the flow: `summarise` asks `minisgl` through it, inside the same tritonserver. One call is one
request that is not streamed, so it gets exactly one response, and that is not a matter of taste. With several
responses to a call the stub of server 2.51 fails its caller (docs/neighbours.md has the measurements):

- an error after the first response is lost, and the caller waits for ever;
- threads that iterate over responses while another one makes a call block each other, or corrupt the stub's memory;
- a call can not be cancelled, and dropping its iterator waits for the last response.

Whoever wants a long answer in pieces, and to leave in between, asks for it in slices.

The stub also keeps a reference of its own to every iterator of responses, and lets go of it on a thread of its own
when the last response was taken. If that reference is the last one, it frees the response's arrays there without
holding Python's lock, and the stub's memory is broken: it dies, now or later, and its clients wait for ever. So ours
must be the last: see Retained.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from minisgl_backend.errors import EngineUnavailable, Status, error_of
from minisgl_backend.messages.client import FinishReason
from minisgl_backend.serving.reply import ERROR_CODES
from minisgl_backend.serving.triton import TritonStub

_MOST_RETAINED = 64
"""With more iterators than that, a question is due: answers that end before their first turn comes would ask none."""

_OUTPUTS = ("text_output", "finish_reason", "num_output_tokens")


@dataclass(frozen=True)
class Said:
    """The answer to a call."""

    text: str
    reason: FinishReason
    num_tokens: int


Call = Callable[[str, Mapping[str, Any]], Said]
"""prompt, sampling parameters → the answer. Blocks; thread-safe. Raises RequestError, with the callee's own message."""


class Retained:
    """The iterators of calls that have ended, until the stub's own thread has let go of them. Thread-safe.

    That thread works one queue off, in order. `is_cancelled` of any request waits for its own turn in it, so when that
    returns False (True may come from memory), the thread has let go of every iterator retained before.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._iterators: deque[Any] = deque()  # oldest first
        self._released = 0  # so many were released already

    def __len__(self) -> int:
        return len(self._iterators)

    def keep(self, iterator: Any) -> None:
        """Takes a reference over, once the last response was taken, which is what tells the stub's thread."""
        with self._lock:
            self._iterators.append(iterator)

    def mark(self) -> int:
        """Before a question for a cancel: what `passed` takes after it."""
        with self._lock:
            return self._released + len(self._iterators)

    def passed(self, mark: int) -> None:
        """The question came back: what was retained before `mark` is ours alone, and is dropped."""
        with self._lock:
            while self._released < mark:
                self._iterators.popleft()
                self._released += 1

    def is_due(self) -> bool:
        """Whether so many are retained that a question must be asked before the next answer ends."""
        return len(self._iterators) > _MOST_RETAINED


def model_call(stub: TritonStub, model: str, retained: Retained) -> Call:
    """Calls of the model `model`, which speaks the dialect of `minisgl`. Their iterators go to `retained`."""

    def call(prompt: str, sampling: Mapping[str, Any]) -> Said:
        inputs = [
            stub.Tensor("text_input", _string(prompt)),
            stub.Tensor("sampling_parameters", _string(json.dumps(sampling))),
            stub.Tensor("exclude_input_in_output", np.array([True])),
            stub.Tensor("return_num_output_tokens", np.array([True])),
        ]
        request = stub.InferenceRequest(model_name=model, requested_output_names=list(_OUTPUTS), inputs=inputs)
        responses = request.exec(decoupled=True)
        try:
            answers = list(responses)
        finally:
            retained.keep(responses)
        if not answers:  # two calls refused by Triton itself at the same time: the stub gives both to one of them
            raise EngineUnavailable(f"a call of the model {model!r} was refused, try again later")
        (response,) = answers
        if response.has_error():
            _raise(stub, model, response.error())
        outputs = {tensor.name(): tensor.as_numpy().reshape(-1)[0] for tensor in response.output_tensors()}
        text, reason, num_tokens = (outputs[name] for name in _OUTPUTS)
        return Said(text.decode("utf-8"), FinishReason(reason.decode("ascii")), int(num_tokens))

    return call


def _raise(stub: TritonStub, model: str, error: Any) -> None:
    """The callee's error as ours. Server 2.51 says INTERNAL for every error of a call; its message is whole."""
    message = str(error.message())
    if message.endswith(f"Model '{model}' is not ready."):  # Triton's own: not loaded, or being unloaded
        raise EngineUnavailable(f"the model {model!r} is not loaded, try again later")
    statuses = {getattr(stub.TritonError, name, None): status for status, name in ERROR_CODES.items()}
    raise error_of(statuses.get(error.code(), Status.INTERNAL), message)


def _string(text: str) -> Any:
    """A BYTES tensor [1]."""
    return np.array([text.encode("utf-8")], dtype=np.object_)
