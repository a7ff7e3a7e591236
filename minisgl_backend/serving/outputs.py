"""What a response says: what is held of the answers → the arrays of its output tensors.

Where it stands in the flow: a Reply collects the engine's outputs in a Told, and has the request's Form write each
response of it. A dialect is a way to read requests (tensors.py, tensorrt.py) and a form of responses; the bridge, the
reply and the threads are the same for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from minisgl_backend.messages.client import Chunk, Finished, Started
from minisgl_backend.messages.tokens import count_tokens

NOT_FINISHED = "None"
"""The `finish_reason` of an answer that goes on: in every response of a stream but the last."""


@dataclass
class Held:
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
        """As LARGE_CHARS of reply.py counts."""
        lists = sum(map(len, self.logprobs)) + sum(map(len, self.tool_calls))
        return len(self.text) + len(self.reasoning) + len(self.tokens) * with_ids + lists

    def sent(self) -> None:
        self.text, self.reasoning, self.tokens, self.ends = "", "", b"", False
        self.logprobs.clear()
        self.tool_calls.clear()


@dataclass
class Told:
    """What the engine told of a request, as far as it waits to be sent. Owned by the request's Reply."""

    each: list[Held] = field(default_factory=lambda: [Held()])  # by index; as many as Started says
    started: Started | None = None  # comes before the first text
    prompt_logprobs: bytes = b""  # JSON
    prompt_ids: bytes = b""  # packed int32
    result: bytes = b""  # JSON, of an operation
    ids: bool = False  # the request asks for token ids by a parameter

    def start(self, started: Started) -> None:
        """The first output of a request."""
        self.started, self.prompt_ids = started, started.prompt_ids
        self.ids |= bool(started.prompt_ids)
        self.each = [Held() for _ in range(started.num_samples)]

    def sent(self) -> None:
        """A response was made of all that is held."""
        for held in self.each:
            held.sent()
        self.prompt_ids = self.prompt_logprobs = b""


class Form(Protocol):
    """How one request's responses are written."""

    @property
    def finish_reason(self) -> bool:
        """Whether each response has the output `finish_reason`, which the reply adds itself."""
        ...

    @property
    def output_ids(self) -> bool:
        """Whether token ids are told."""
        ...

    @property
    def logprobs(self) -> bool:
        """Whether something is told of each token, so that a token without text is news."""
        ...

    def arrays(self, told: Told) -> dict[str, Any]:
        """The output tensors of the next response, by name; all but `finish_reason`."""
        ...


@dataclass(frozen=True)
class Wanted:
    """The form of `minisgl`, which is that of Triton's vLLM backend and more: what a client wants in its responses,
    beside `text_output`.
    """

    finish_reason: bool = True
    num_input_tokens: bool = False
    num_output_tokens: bool = False  # the tokens of each response, as Triton's vLLM backend counts them
    output_ids: bool = False  # the tokens themselves
    perf_metrics: bool = False  # num_cached_tokens, queue_ms, ttft_ms
    logprobs: bool = False  # of the tokens of each response; "null" when no parameter asks for them
    cumulative_logprob: bool = False  # the sum of those of all tokens so far
    parsed: bool = False  # reasoning_output, tool_calls

    def arrays(self, told: Told) -> dict[str, Any]:
        each = told.each
        outputs = {"text_output": strings(held.text.encode("utf-8") for held in each)}
        if self.num_output_tokens:
            outputs["num_output_tokens"] = np.array([count_tokens(held.tokens) for held in each], dtype=np.uint32)
        if told.ids:
            outputs["output_ids"] = _ids(b"".join(held.tokens for held in each))
        if self.logprobs:
            outputs["logprobs"] = strings(held.json for held in each)
        if self.cumulative_logprob:
            outputs["cumulative_logprob"] = np.array([held.logprob for held in each], dtype=np.float32)
        if self.parsed:
            outputs["reasoning_output"] = strings(held.reasoning.encode("utf-8") for held in each)
            outputs["tool_calls"] = strings(_joined(held.tool_calls) for held in each)
        if told.prompt_ids:
            outputs["prompt_token_ids"] = _ids(told.prompt_ids)
        if told.prompt_logprobs:
            outputs["prompt_logprobs"] = strings([told.prompt_logprobs])
        if told.started is not None:
            outputs |= self._of_start(told.started)
        return outputs

    def _of_start(self, started: Started) -> dict[str, Any]:
        outputs: dict[str, Any] = {}
        if self.num_input_tokens:
            outputs["num_input_tokens"] = np.array([started.num_input_tokens], dtype=np.uint32)
        if self.perf_metrics:
            outputs["num_cached_tokens"] = np.array([started.num_cached_tokens], dtype=np.uint32)
            outputs["queue_ms"] = np.array([started.queue_ms], dtype=np.float32)
            outputs["ttft_ms"] = np.array([started.ttft_ms], dtype=np.float32)
        return outputs


@dataclass(frozen=True)
class OperationResult:
    """The form of a request that names an operation: one response with the output `result`."""

    finish_reason: bool = False
    output_ids: bool = False
    logprobs: bool = False

    def arrays(self, told: Told) -> dict[str, Any]:
        return {"result": strings([told.result])}


def strings(values: Iterable[bytes]) -> Any:
    """A BYTES tensor. dtype object, because numpy's own bytes lose trailing zeros."""
    return np.array(list(values), dtype=np.object_)


def _joined(lists: Iterable[bytes]) -> bytes:
    """JSON lists as one."""
    return b"[%b]" % b",".join(part[1:-1] for part in lists if len(part) > 2)


def _ids(packed: bytes) -> Any:
    """An INT32 tensor."""
    return np.frombuffer(packed, dtype="<i4").astype(np.int32)
