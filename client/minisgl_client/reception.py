"""One answer as it comes in: Triton's responses → pieces, an end, or an error. Pure; both clients drive it.

    a response ──► take ──► Piece | None
    the end of the call ──► closed, failed ──► over ──► result() returns or raises

A silent server is noticed by asking another thing of it: gRPC's own pings can not be used, since Triton closes a
connection that pings more often than every five minutes.
"""

from __future__ import annotations

import json
import struct
from typing import Any

from minisgl_client.errors import Cancelled, ClientError, ServerFault, error_of_status, error_of_words
from minisgl_client.pieces import Logprob, Logprobs, Piece, Sample, ToolCall, Usage

HEADERS = (("triton_grpc_error", "true"),)  # errors of the model as gRPC statuses, not as words alone

_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_retries", 0),
    ("grpc.service_config_disable_resolution", 1),  # nor may a name server turn them on
    ("grpc.use_local_subchannel_pool", 1),  # a client's connection is its own, and ends with it
)

SILENCE_S = 15.0  # without a word, after which the server is asked whether it lives
PROBE_S = 10.0  # for its answer


def channel_options(url: str) -> tuple[tuple[str, int], ...]:
    """For the channel of a client to "host:port"."""
    host = url.rpartition(":")[0].removeprefix("ipv4:").removeprefix("ipv6:").removeprefix("dns:").strip("/[]")
    if host == "localhost" or host.startswith("127.") or host == "::1":
        return (*_CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0))  # http_proxy without no_proxy is a common setting
    return _CHANNEL_OPTIONS


class Reception:
    """State of one answer. `over` is set once its fate is known, by the final response or by an error."""

    def __init__(self) -> None:
        self.begun = False
        self.over = False
        self.told: bytes | None = None  # JSON: the result of an operation
        self._has_reason = False  # the last piece
        self._error: ClientError | None = None

    def take(self, response: Any) -> Piece | None:
        """A ModelStreamInferResponse. None when it has nothing for the reader."""
        if response.error_message:
            self._settle(error_of_words(response.error_message))
            return None
        try:
            tensors = _tensors(response.infer_response)
            self.told = _first(tensors, "result") or self.told
            piece = _piece(tensors)
        except (
            ValueError,
            IndexError,
            KeyError,
            TypeError,
            AttributeError,
            struct.error,
        ):  # UnicodeDecodeError is a ValueError
            self._settle(ServerFault("the server sent a response that can not be read"))
            return None
        if self.told is not None:
            self._has_reason = True
        if piece is not None:
            self.begun, self._has_reason = True, piece.finish_reason is not None
        if response.infer_response.parameters["triton_final_response"].bool_param:
            self._settle(None if self._has_reason else ServerFault("the server ended the answer without a reason"))
        return piece

    def closed(self) -> None:
        """The server ended the call, as it does after a final response."""
        self._settle(ServerFault("the server ended the stream without a final response"))

    def failed(self, status: str, words: str) -> None:
        """The call ended with a gRPC status that is not OK."""
        self._settle(error_of_status(status, words or status, begun=self.begun))

    def silent(self) -> None:
        """The server says nothing, not even whether it lives."""
        self.failed("UNAVAILABLE", "the server has fallen silent")

    def cancelled(self) -> None:
        """Here, by who waited for it."""
        self._settle(Cancelled())

    def result(self) -> None:
        """When over: returns when the answer is whole, else raises what ended it."""
        if self._error is not None:
            raise self._error

    def answer(self) -> Any:
        """When over: the result of an operation. Raises what ended it."""
        self.result()
        try:
            return json.loads(self.told or b"")
        except ValueError:
            raise ServerFault("the server sent no result that can be read") from None

    def _settle(self, error: ClientError | None) -> None:
        """The first end counts. The error stands before `over` does: another thread may look."""
        if not self.over:
            self._error = error
            self.over = True


def _tensors(response: Any) -> dict[str, list[Any]]:
    return {
        tensor.name: _values(tensor.datatype, raw)
        for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }


def _piece(tensors: dict[str, list[Any]]) -> Piece | None:
    """None for the bare end of an answer whose last piece has come, and for the result of an operation."""
    if "text_output" not in tensors:
        return None
    samples = _samples(tensors)
    counts = tensors.get("num_output_tokens")
    told = _first(tensors, "prompt_logprobs")
    prompt_ids = tensors.get("prompt_token_ids")
    return Piece(
        text=samples[0].text,
        finish_reason=samples[0].finish_reason,
        output_ids=samples[0].output_ids,
        usage=Usage(
            input_tokens=_first(tensors, "num_input_tokens"),
            output_tokens=None if counts is None else sum(counts),
            cached_tokens=_first(tensors, "num_cached_tokens"),
            ttft_ms=_first(tensors, "ttft_ms"),
            queue_ms=_first(tensors, "queue_ms"),
        ),
        logprobs=samples[0].logprobs,
        prompt_logprobs=None if told is None else _logprobs(told),
        prompt_ids=None if prompt_ids is None else tuple(prompt_ids),
        samples=samples if len(samples) > 1 else (),
        reasoning=samples[0].reasoning,
        tool_calls=samples[0].tool_calls,
        cumulative_logprob=samples[0].cumulative_logprob,
    )


_NO_LOGPROBS, _NO_CALLS = b"null", b"[]"  # of nearly every piece: not worth a parser


def _samples(tensors: dict[str, list[Any]]) -> tuple[Sample, ...]:
    """An element of each tensor for each answer; the ids of all stand in one, and their counts tell where they part."""
    texts, ids = tensors["text_output"], tensors.get("output_ids")

    def each(name: str, nothing: Any) -> list[Any]:
        return tensors.get(name, [nothing] * len(texts))

    counts = tensors["num_output_tokens"] if ids is not None and len(texts) > 1 else [len(ids or ())] * len(texts)
    rows = zip(
        texts,
        counts,
        each("finish_reason", b"None"),
        each("logprobs", _NO_LOGPROBS),
        each("reasoning_output", b""),
        each("tool_calls", _NO_CALLS),
        each("cumulative_logprob", None),
        strict=True,
    )
    samples, at = [], 0
    for text, count, reason, logprobs, reasoning, calls, cumulative in rows:
        own = None if ids is None else tuple(ids[at : at + count])
        at += len(own or ())
        ended = None if reason == b"None" else reason.decode()
        parsed = (reasoning.decode(), _calls(calls))
        samples.append(Sample(text.decode(), ended, own, _logprobs(logprobs), *parsed, cumulative))
    return tuple(samples)


def _calls(raw: bytes) -> tuple[ToolCall, ...]:
    """Deltas; of an answer in one response whole calls, which say no index."""
    if raw == _NO_CALLS:
        return ()
    return tuple(
        ToolCall(call.get("index", place), call.get("name", ""), call["arguments"])
        for place, call in enumerate(json.loads(raw))
    )


def _logprobs(raw: bytes) -> Logprobs | None:
    if raw == _NO_LOGPROBS:
        return None
    told = json.loads(raw)
    return None if told is None else tuple(None if entries is None else _entries(entries) for entries in told)


def _entries(entries: dict[str, Any]) -> dict[int, Logprob]:
    return {
        int(token): Logprob(
            one["logprob"], one["rank"], one["decoded_token"], tuple(one["bytes"]) if "bytes" in one else None
        )
        for token, one in entries.items()
    }


def _first(tensors: dict[str, list[Any]], name: str) -> Any:
    return tensors[name][0] if name in tensors else None


def _values(datatype: str, raw: bytes) -> list[Any]:
    if datatype == "BYTES":
        return _strings(raw)
    code = _CODES.get(datatype)
    return [] if code is None else list(struct.unpack(f"<{len(raw) // 4}{code}", raw))


_CODES = {"INT32": "i", "UINT32": "I", "FP32": "f"}


def _strings(raw: bytes) -> list[bytes]:
    """Each element is its length in four bytes, then itself."""
    found, at = [], 0
    while at < len(raw):
        (length,) = struct.unpack_from("<I", raw, at)
        at += 4 + length
        if at > len(raw):
            raise ValueError("an element is cut off")
        found.append(raw[at - length : at])
    return found
