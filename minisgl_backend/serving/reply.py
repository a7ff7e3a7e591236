"""The answer to one Triton request: the only place that touches its response sender.

Where it stands in the flow: the bridge makes a Reply in `execute`, and either refuses the request with it at once or
gives it to a sender thread, which feeds it the engine's outputs. Whatever happens in between, exactly one response
carries FINAL: without it the client hangs and the model can not be unloaded; a second one crashes the server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minisgl_backend.errors import Status
from minisgl_backend.messages.client import Chunk, Failed, Finished, Output, PromptLogprobs, Started
from minisgl_backend.messages.tokens import count_tokens
from minisgl_backend.serving.triton import ResponseSender, TritonStub

NOT_FINISHED = "None"
"""The `finish_reason` of an answer that goes on: in every response of a stream but the last."""

LARGE_CHARS = 65_536
"""A last response of more (characters of text, bytes of token ids, logprobs and tool calls) goes out ahead of FINAL.
The stub closes a sender before it copies the response to shared memory: a last response that finds no room there would
take FINAL with it."""

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
    logprobs: bool = False  # of the tokens of each response; "null" when no parameter asks for them
    cumulative_logprob: bool = False  # the sum of those of all tokens so far
    parsed: bool = False  # reasoning_output, tool_calls


@dataclass
class _Held:
    """What was received of one of the n answers and not sent yet."""

    text: str = ""
    tokens: bytes = b""  # packed int32, those of the text and of what has no text
    logprobs: list[bytes] = field(default_factory=list)  # JSON lists
    asks_logprobs: bool = False
    reasoning: str = ""
    tool_calls: list[bytes] = field(default_factory=list)  # JSON lists
    logprob: float = 0.0  # of all tokens, sent or not
    reason: str = NOT_FINISHED
    ends: bool = False  # the reason is news

    def add(self, output: Chunk | Finished) -> None:
        self.text += output.text
        self.tokens += output.tokens
        self.logprob += output.logprob
        self.reasoning += output.reasoning
        if output.tool_calls:
            self.tool_calls.append(output.tool_calls)
        if output.logprobs:
            self.asks_logprobs = True
            self.logprobs.append(output.logprobs)
        if output.reason is not None:
            self.reason, self.ends = output.reason.value, True

    @property
    def json(self) -> bytes:
        """All logprobs as one list."""
        if not self.asks_logprobs:
            return b"null"
        return _joined(self.logprobs)

    def size(self, with_ids: bool) -> int:
        """As LARGE_CHARS counts."""
        lists = sum(map(len, self.logprobs)) + sum(map(len, self.tool_calls))
        return len(self.text) + len(self.reasoning) + len(self.tokens) * with_ids + lists

    def sent(self) -> None:
        self.text, self.reasoning, self.tokens, self.ends = "", "", b"", False
        self.logprobs.clear()
        self.tool_calls.clear()


class Reply:
    """Owns one response sender. Used by one thread at a time (see ResponseSender); the owner hands it over whole.

    A streamed answer is one response per call of `give` that brings text (or tokens whose ids are wanted); any other
    answer is one response in all. FINAL travels on the last of them, after a long one by itself. With n answers every
    response has an element for each: a delta that may be empty, and a reason that stays once it is there.
    """

    def __init__(self, stub: TritonStub, sender: ResponseSender, stream: bool, wanted: Wanted) -> None:
        self._stub = stub
        self._sender = sender
        self._stream = stream
        self._wanted = wanted
        self._started: Started | None = None  # comes before the first text
        self._held = [_Held()]  # by index; as many as Started says
        self._prompt_logprobs = b""  # JSON
        self._prompt_ids = b""  # packed int32
        self._wants_ids = wanted.output_ids
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
            if self._stream and not self._ended and self._has_news():
                self._sender.send(self._piece())
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
            self._started, self._prompt_ids = output, output.prompt_ids
            self._wants_ids |= bool(output.prompt_ids)
            self._held = [_Held() for _ in range(output.num_samples)]
        elif isinstance(output, Failed):
            self.fail(output.status, output.message)
        elif isinstance(output, PromptLogprobs):
            self._prompt_logprobs = output.logprobs
        else:
            self._held[output.index].add(output)
            if isinstance(output, Finished):
                self._finish()

    def _has_news(self) -> bool:
        tells_tokens = self._wants_ids or self._wanted.logprobs
        return any(
            held.text or held.ends or held.reasoning or held.tool_calls or (held.tokens and tells_tokens)
            for held in self._held
        )

    def _finish(self) -> None:
        if sum(held.size(self._wants_ids) for held in self._held) + len(self._prompt_logprobs) > LARGE_CHARS:
            self._sender.send(self._piece())
            self._end(_nothing)
        else:
            self._end(self._piece)

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

    def _piece(self) -> Any:
        """The response of what is held, which is then held no more."""
        tensors = [self._stub.Tensor(name, array) for name, array in self._outputs().items()]
        if self._wanted.finish_reason:
            tensors.append(self._reasons())
        for held in self._held:
            held.sent()
        self._prompt_ids = self._prompt_logprobs = b""
        return self._stub.InferenceResponse(tensors)

    def _reasons(self) -> Any:
        """Triton only reads a tensor, so one may be in many responses, though of one thread alone."""
        reasons = [held.reason for held in self._held]
        if any(reason != NOT_FINISHED for reason in reasons):
            return self._stub.Tensor("finish_reason", _strings(reason.encode("ascii") for reason in reasons))
        if self._not_finished is None:
            self._not_finished = self._stub.Tensor(
                "finish_reason", _strings([NOT_FINISHED.encode("ascii")] * len(reasons))
            )
        return self._not_finished

    def _outputs(self) -> dict[str, Any]:
        wanted, each = self._wanted, self._held
        outputs = {"text_output": _strings(held.text.encode("utf-8") for held in each)}
        if wanted.num_output_tokens:
            outputs["num_output_tokens"] = np.array([count_tokens(held.tokens) for held in each], dtype=np.uint32)
        if self._wants_ids:
            outputs["output_ids"] = _ids(b"".join(held.tokens for held in each))
        if wanted.logprobs:
            outputs["logprobs"] = _strings(held.json for held in each)
        if wanted.cumulative_logprob:
            outputs["cumulative_logprob"] = np.array([held.logprob for held in each], dtype=np.float32)
        if wanted.parsed:
            outputs["reasoning_output"] = _strings(held.reasoning.encode("utf-8") for held in each)
            outputs["tool_calls"] = _strings(_joined(held.tool_calls) for held in each)
        if self._prompt_ids:
            outputs["prompt_token_ids"] = _ids(self._prompt_ids)
        if self._prompt_logprobs:
            outputs["prompt_logprobs"] = _strings([self._prompt_logprobs])
        if self._started is not None:
            outputs |= _of_start(self._started, wanted)
        return outputs

    def _error(self, status: Status, message: str) -> Any:
        code = getattr(self._stub.TritonError, ERROR_CODES[status], None)  # old stubs lack some codes, or all
        error = self._stub.TritonError(message) if code is None else self._stub.TritonError(message, code)
        return self._stub.InferenceResponse([], error)

    def _log(self, line: str) -> None:
        self._stub.Logger.log_error(f"minisgl: {line}")


def _joined(lists: Iterable[bytes]) -> bytes:
    """JSON lists as one."""
    return b"[%b]" % b",".join(part[1:-1] for part in lists if len(part) > 2)


def _nothing() -> None:
    """FINAL alone is no response to the client."""


def _strings(values: Iterable[bytes]) -> Any:
    """A BYTES tensor. dtype object, because numpy's own bytes lose trailing zeros."""
    return np.array(list(values), dtype=np.object_)


def _ids(packed: bytes) -> Any:
    """An INT32 tensor."""
    return np.frombuffer(packed, dtype="<i4").astype(np.int32)


def _of_start(started: Started, wanted: Wanted) -> dict[str, Any]:
    outputs: dict[str, Any] = {}
    if wanted.num_input_tokens:
        outputs["num_input_tokens"] = np.array([started.num_input_tokens], dtype=np.uint32)
    if wanted.perf_metrics:
        outputs["num_cached_tokens"] = np.array([started.num_cached_tokens], dtype=np.uint32)
        outputs["queue_ms"] = np.array([started.queue_ms], dtype=np.float32)
        outputs["ttft_ms"] = np.array([started.ttft_ms], dtype=np.float32)
    return outputs
