"""The answer to one Triton request: the only place that touches its response sender.

Where it stands in the flow: the bridge makes a Reply in `execute`, and either refuses the request with it at once or
gives it to a sender thread, which feeds it the engine's outputs. Whatever happens in between, exactly one response
carries FINAL: without it the client hangs and the model can not be unloaded; a second one crashes the server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minisgl_backend.errors import Status
from minisgl_backend.messages.client import Failed, Finished, Output, Started
from minisgl_backend.messages.tokens import count_tokens
from minisgl_backend.serving.triton import ResponseSender, TritonStub

NOT_FINISHED = "None"
"""The `finish_reason` of every response of a stream but the last."""

LARGE_CHARS = 65_536
"""A longer last text (or as many bytes of token ids) goes out ahead of FINAL. The stub closes a sender before it copies
the response to shared memory: a last response that finds no room there would take FINAL with it."""

ERROR_CODES = {
    Status.INVALID_ARGUMENT: "INVALID_ARG",
    Status.UNSUPPORTED: "UNSUPPORTED",
    Status.UNAVAILABLE: "UNAVAILABLE",
    Status.CANCELLED: "CANCELLED",
    Status.INTERNAL: "INTERNAL",
}


@dataclass(frozen=True)
class Wanted:
    """What a client wants in its responses, beside `text_output`."""

    finish_reason: bool = True
    num_input_tokens: bool = False
    num_output_tokens: bool = False  # the tokens of each response, as Triton's vLLM backend counts them
    output_ids: bool = False  # the tokens themselves
    perf_metrics: bool = False  # num_cached_tokens, queue_ms, ttft_ms


class Reply:
    """Owns one response sender. Used by one thread at a time (see ResponseSender); the owner hands it over whole.

    A streamed answer is one response per call of `give` that brings text (or tokens whose ids are wanted); any other
    answer is one response in all. FINAL travels on the last of them, after a long one by itself.
    """

    def __init__(self, stub: TritonStub, sender: ResponseSender, stream: bool, wanted: Wanted) -> None:
        self._stub = stub
        self._sender = sender
        self._stream = stream
        self._wanted = wanted
        self._started: Started | None = None  # comes before the first text
        self._text = ""  # received and not sent yet
        self._tokens = b""  # packed int32, those of the text and of what has no text
        self._not_finished: Any = None  # one tensor for all responses that do not end the answer, once it is needed
        self._ended = False

    @property
    def ended(self) -> bool:
        """FINAL was sent, or Triton refused every attempt to send it."""
        return self._ended

    def is_cancelled(self) -> bool:
        """Whether the client left. False after FINAL: asking Triton then crashes the server."""
        return not self._ended and bool(self._sender.is_cancelled())

    def give(self, outputs: Sequence[Output]) -> None:
        """Sends outputs, in order, joined into one response. Never raises: an exception ends the answer with an
        error. Text that arrives together with a Failed is not sent: the error ends the answer.
        """
        try:
            for output in outputs:
                self._take(output)
            if self._stream and not self._ended and (self._text or (self._tokens and self._wanted.output_ids)):
                self._sender.send(self._piece(NOT_FINISHED))
        except Exception as error:
            self._log(f"a response could not be sent: {error!r}")
            self.fail(Status.INTERNAL, "the answer could not be sent")

    def fail(self, status: Status, message: str) -> None:
        """Ends the answer with an error. Never raises. After the end it is logged and has no effect."""
        if self._ended:
            self._log(f"an answer that has ended was to fail: {status}: {message}")
            return
        self._end(self._error, status, message)

    def _take(self, output: Output) -> None:
        if self._ended:
            self._log(f"an answer that has ended got one more {type(output).__name__}")
        elif isinstance(output, Started):
            self._started = output
        elif isinstance(output, Failed):
            self.fail(output.status, output.message)
        else:
            self._text += output.text
            self._tokens += output.tokens
            if isinstance(output, Finished):
                self._finish(output.reason.value)

    def _finish(self, reason: str) -> None:
        if max(len(self._text), len(self._tokens) * self._wanted.output_ids) > LARGE_CHARS:
            self._sender.send(self._piece(reason))
            self._end(_nothing)
        else:
            self._end(self._piece, reason)

    def _end(self, build: Callable[..., Any], *arguments: Any) -> None:
        """Sends FINAL with the response `build` makes, or else with an error. Marked ended before the first attempt:
        after an exception nobody knows whether FINAL went out, and where it did Triton refuses it the second time.
        """
        self._ended = True
        attempts = ((build, arguments), (self._error, (Status.INTERNAL, "the answer could not be sent")))
        for make, values in attempts:
            try:
                self._sender.send(make(*values), self._stub.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                return
            except Exception as error:
                self._log(f"the last response could not be sent: {error!r}")

    def _piece(self, reason: str) -> Any:
        """The response of what is held, which is then held no more."""
        text, self._text = self._text, ""
        tokens, self._tokens = self._tokens, b""
        wanted, tensor = self._wanted, self._stub.Tensor
        tensors = [tensor("text_output", _one(text.encode("utf-8")))]
        if wanted.finish_reason:
            tensors.append(self._reason(reason))
        if wanted.num_output_tokens:
            tensors.append(tensor("num_output_tokens", np.array([count_tokens(tokens)], dtype=np.uint32)))
        if wanted.output_ids:
            tensors.append(tensor("output_ids", np.frombuffer(tokens, dtype="<i4").astype(np.int32)))
        if self._started is not None:
            tensors += [tensor(name, array) for name, array in _of_start(self._started, wanted).items()]
        return self._stub.InferenceResponse(tensors)

    def _reason(self, reason: str) -> Any:
        """Triton only reads a tensor, so one may be in many responses, though of one thread alone."""
        if reason != NOT_FINISHED:
            return self._stub.Tensor("finish_reason", _one(reason.encode("ascii")))
        if self._not_finished is None:
            self._not_finished = self._stub.Tensor("finish_reason", _one(NOT_FINISHED.encode("ascii")))
        return self._not_finished

    def _error(self, status: Status, message: str) -> Any:
        code = getattr(self._stub.TritonError, ERROR_CODES[status], None)  # old stubs lack some codes, or all
        error = self._stub.TritonError(message) if code is None else self._stub.TritonError(message, code)
        return self._stub.InferenceResponse([], error)

    def _log(self, line: str) -> None:
        self._stub.Logger.log_error(f"minisgl: {line}")


def _nothing() -> None:
    """FINAL alone is no response to the client."""


def _one(value: bytes) -> Any:
    """A BYTES tensor [1]. dtype object, because numpy's own bytes lose trailing zeros."""
    return np.array([value], dtype=np.object_)


def _of_start(started: Started, wanted: Wanted) -> dict[str, Any]:
    outputs: dict[str, Any] = {}
    if wanted.num_input_tokens:
        outputs["num_input_tokens"] = np.array([started.num_input_tokens], dtype=np.uint32)
    if wanted.perf_metrics:
        outputs["num_cached_tokens"] = np.array([started.num_cached_tokens], dtype=np.uint32)
        outputs["queue_ms"] = np.array([started.queue_ms], dtype=np.float32)
        outputs["ttft_ms"] = np.array([started.ttft_ms], dtype=np.float32)
    return outputs
