"""One request: what the caller of `Client` and `AsyncClient` writes → the protobuf message that Triton reads.

Where it stands in the flow: both clients build a `Request` of their arguments and send `encode(request)`. What is wrong
in itself (no prompt or two, text that is no Unicode, a value that JSON can not hold) is refused here, by the field's
name; all else is the server's to judge.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import msgspec
from tritonclient.grpc import service_pb2

from minisgl_client.errors import RequestRefused


class SamplingFields(TypedDict, total=False):
    """Sampling parameters by their names on the server; it has the defaults and the ranges. Any other name goes to the
    server too, which refuses those it does not know.
    """

    n: int  # answers; the pieces then have `samples`
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float] | None
    bad_words: str | Sequence[str]
    allowed_token_ids: Sequence[int] | None
    ignore_eos: bool
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    logprobs: int | None  # the pieces then carry them
    prompt_logprobs: int | None
    skip_special_tokens: bool
    spaces_between_special_tokens: bool  # of no effect: the server's decoders put none
    truncate_prompt_tokens: int | None
    echo: bool
    return_token_ids: bool  # of the prompt, too
    structured_outputs: Mapping[str, Any] | None  # the answer's form: json, regex, choice, grammar, structural_tag, …
    guided_json: Mapping[str, Any] | str | bool | None  # the same by older names; one of all these at most
    guided_regex: str | None
    guided_choice: Sequence[str] | None
    guided_grammar: str | None
    response_format: Mapping[str, Any] | None
    json_schema: Mapping[str, Any] | str | bool | None
    priority: int  # smaller runs earlier
    deadline_ms: float | None  # the server's own limit, from the arrival of the request
    cache_salt: str | None  # requests share cached prefixes only under the same one
    chat_template_kwargs: Mapping[str, Any] | None
    chat_template: str | None  # in place of the model's; only where the server allows it
    add_generation_prompt: bool
    continue_final_message: bool  # the answer goes on with the last message, the assistant's


class RequestFields(SamplingFields, total=False):
    """All that a request may say beside its text."""

    messages: Sequence[Mapping[str, Any]]  # a chat, for the model's template: {"role": …, "content": …} each
    tools: Sequence[Mapping[str, Any]] | None  # of a chat: functions as in OpenAI's API, for the template
    parse_output: bool  # of a chat: its answer has `reasoning` and `tool_calls`, and the text is the content alone
    input_ids: Sequence[int]
    timeout_s: float | None  # the whole answer must be here by then, else TimedOut
    request_id: str  # comes back on the responses and in the server's log
    return_output_ids: bool  # the pieces carry the ids of their tokens
    return_cumulative_logprob: bool  # the pieces carry the sum of the logprobs so far
    return_usage: bool  # the pieces carry counts and times (default)


MAX_TIMEOUT_S = 2**31  # 68 years; gRPC takes what its clock can not hold for a time that has passed


@dataclass(frozen=True, kw_only=True)
class Request:
    """Exactly one of text, messages and input_ids is there, unless it names an operation, which may need none."""

    text: str | None
    messages: Sequence[Mapping[str, Any]] | msgspec.Raw | None  # Raw: JSON already
    input_ids: Sequence[int] | None
    tools: Sequence[Mapping[str, Any]] | None
    parse_output: bool
    stream: bool  # pieces as they come, or one
    timeout_s: float | None
    request_id: str
    return_output_ids: bool
    return_cumulative_logprob: bool
    return_usage: bool
    sampling: Mapping[str, Any]
    operation: str = ""  # empty: a generation

    @classmethod
    def of(cls, text: str | None, stream: bool, **fields: Unpack[RequestFields]) -> Request:
        """Sorts a caller's arguments. Raises RequestRefused unless there is exactly one prompt."""
        request = cls._sorted(text, stream, "", dict(fields))
        prompts = (request.text, request.messages, request.input_ids)
        if sum(prompt is not None for prompt in prompts) != 1:
            raise RequestRefused("text, messages, input_ids: exactly one of them must be given")
        return request

    @classmethod
    def asking(cls, operation: str, text: str | None, fields: Mapping[str, Any]) -> Request:
        """For an operation, which the server judges with all that it is given."""
        return cls._sorted(text, False, operation, {"return_usage": False, **fields})

    @classmethod
    def _sorted(cls, text: str | None, stream: bool, operation: str, sampling: dict[str, Any]) -> Request:
        request = cls(
            text=text,
            messages=sampling.pop("messages", None),
            input_ids=sampling.pop("input_ids", None),
            tools=sampling.pop("tools", None),
            parse_output=sampling.pop("parse_output", False),
            stream=stream,
            timeout_s=sampling.pop("timeout_s", None),
            request_id=sampling.pop("request_id", ""),
            return_output_ids=sampling.pop("return_output_ids", False),
            return_cumulative_logprob=sampling.pop("return_cumulative_logprob", False),
            return_usage=sampling.pop("return_usage", True),
            sampling=sampling,
            operation=operation,
        )
        if request.timeout_s is not None and not 0 < request.timeout_s <= MAX_TIMEOUT_S:
            raise RequestRefused(f"timeout_s: must be more than 0 and at most {MAX_TIMEOUT_S}, got {request.timeout_s}")
        return request


def infer_method(channel: Any) -> Any:
    """The call that carries one request, on a channel of grpc or of grpc.aio."""
    return channel.unary_stream(
        "/inference.GRPCInferenceService/ModelStreamInfer",
        request_serializer=service_pb2.ModelInferRequest.SerializeToString,
        response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
    )


def encode(request: Request, model: str) -> Any:
    """The ModelInferRequest. Raises RequestRefused, naming the field."""
    try:
        made = service_pb2.ModelInferRequest(model_name=model, id=request.request_id)
    except (TypeError, ValueError) as error:
        raise RequestRefused(f"request_id: must be a string of Unicode characters ({error})") from None
    made.parameters["triton_enable_empty_final_response"].bool_param = True
    if request.operation:
        _add(made, "operation", "BYTES", _text("operation", request.operation))
    if request.text is not None:
        _add(made, "text_input", "BYTES", _text("text", request.text))
        if not request.operation and not request.stream and not request.sampling.get("echo"):
            _add(made, "exclude_input_in_output", "BOOL", b"\x01")
    if request.messages is not None:
        _add(made, "messages", "BYTES", _messages(request.messages))
    if request.tools is not None:
        _add(made, "tools", "BYTES", _json("tools", _plain(request.tools)))
    if request.input_ids is not None:
        ids = _ids(request.input_ids)
        _add(made, "input_ids", "INT32", ids, len(ids) // 4)
    if request.sampling:
        _add(made, "sampling_parameters", "BYTES", _parameters(request.sampling))
    for name in _flags(request):
        _add(made, name, "BOOL", b"\x01")
    return made


def _flags(request: Request) -> list[str]:
    flags = ["stream"] if request.stream else []
    if request.return_output_ids:
        flags.append("return_output_ids")
    if request.parse_output:
        flags.append("parse_output")
    if request.return_cumulative_logprob:
        flags.append("return_cumulative_logprob")
    if request.return_usage:
        flags += ["return_num_input_tokens", "return_num_output_tokens", "return_perf_metrics"]
    elif request.sampling.get("n", 1) != 1:
        flags.append("return_num_output_tokens")  # they tell whose ids are whose
    asked = request.sampling.get("logprobs")  # 0 asks, too
    if asked is not None and asked is not False:
        flags.append("return_logprobs")
    return flags


def _add(request: Any, name: str, datatype: str, raw: bytes, length: int = 1) -> None:
    request.inputs.add(name=name, datatype=datatype, shape=[length])
    request.raw_input_contents.append(raw)


def _text(field: str, text: str) -> bytes:
    """A BYTES tensor of one element: its length in four bytes, then itself."""
    try:
        raw = text.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise RequestRefused(f"{field}: must be a string of Unicode characters ({error})") from None
    return struct.pack("<I", len(raw)) + raw


def _messages(messages: Sequence[Mapping[str, Any]] | msgspec.Raw) -> bytes:
    if isinstance(messages, msgspec.Raw):
        return struct.pack("<I", len(memoryview(messages))) + bytes(messages)
    return _json("messages", _plain(messages))


def _parameters(sampling: Mapping[str, Any]) -> bytes:
    members = {name: _plain(value) for name, value in sampling.items() if value is not None}
    for name, value in members.items():
        _json(name, value)  # so that the one at fault is named
    return _json("sampling_parameters", members)


def _json(field: str, value: Any) -> bytes:
    try:
        return _text(field, json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestRefused(f"{field}: can not be written as JSON ({error})") from None


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple | range) else value


def _ids(input_ids: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(input_ids)}i", *input_ids)
    except (TypeError, struct.error) as error:
        raise RequestRefused(f"input_ids: must be integers of 32 bits ({error})") from None
