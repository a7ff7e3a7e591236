"""Triton's request → `messages.client.Request`, and what its client wants to be told.

Where it stands in the flow: the bridge calls `read_request` for every request of an `execute` call, on Triton's
thread. It checks what only Triton's side can know (tensors, shapes, types, the places a parameter may stand in);
what the values mean is validated by `text/`. Prompts of every kind pass as bytes, unread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from minisgl_backend.errors import InvalidRequest, UnsupportedFeature
from minisgl_backend.messages.client import Request
from minisgl_backend.messages.ids import RequestId
from minisgl_backend.serving.outputs import Wanted
from minisgl_backend.serving.parameters import (
    merge_option,
    merge_sampling,
    merge_timeout,
    read_parameters,
    refuse_sequence,
)
from minisgl_backend.serving.triton import InferenceRequest, Tensor
from minisgl_backend.text.parameters import (
    BOOL_OPTIONS,
    MAX_PARAMETERS_BYTES,
    MAX_STOP_TOKEN_IDS,
    PROMPT_INPUTS,
    WORD_LISTS,
)
from minisgl_backend.text.values import token_ids

INPUTS = (
    *PROMPT_INPUTS,
    "sampling_parameters",
    *WORD_LISTS,
    "stop_token_ids",
    *BOOL_OPTIONS,
)
"""The inputs that config.pbtxt declares."""

Tensors = Mapping[str, Tensor]


def read_request(request: InferenceRequest, id: RequestId) -> tuple[Request, Wanted]:
    """Copies everything out of Triton's memory. Raises RequestError, naming the field."""
    tensors = {tensor.name(): tensor for tensor in request.inputs()}
    for name in tensors:
        if name not in INPUTS:
            raise UnsupportedFeature(name, "is not an input of this model")
    if request.flags() or request.correlation_id() not in (0, "", "0"):
        refuse_sequence()
    if any(_elements(tensors, "image")):
        raise UnsupportedFeature("image", "this model takes no images")
    parameters = read_parameters(request.parameters())
    options = {name: merge_option(name, _bool(tensors, name), parameters.options) for name in BOOL_OPTIONS}
    message = Request(
        id=id,
        text_input=_bytes(tensors, "text_input"),
        parameters=merge_sampling(_bytes(tensors, "sampling_parameters") or b"", _lists(tensors), parameters.sampling),
        stream=options["stream"] or False,
        exclude_input_in_output=options["exclude_input_in_output"],
        input_ids=_packed(tensors, "input_ids"),
        messages=_bytes(tensors, "messages"),
        tools=_bytes(tensors, "tools"),
        timeout_us=merge_timeout(request.timeout(), parameters.timeout_us),
        return_cumulative_logprob=options["return_cumulative_logprob"] or False,
        parse_output=options["parse_output"] or False,
    )
    return message, _wanted(options)


def _wanted(options: Mapping[str, bool | None]) -> Wanted:
    return Wanted(
        finish_reason=options["return_finish_reason"] is not False,
        num_input_tokens=bool(options["return_num_input_tokens"]),
        num_output_tokens=bool(options["return_num_output_tokens"]),
        output_ids=bool(options["return_output_ids"]),
        perf_metrics=bool(options["return_perf_metrics"]),
        logprobs=bool(options["return_logprobs"]),
        cumulative_logprob=bool(options["return_cumulative_logprob"]),
        parsed=bool(options["parse_output"]),
    )


def _lists(tensors: Tensors) -> dict[str, Any]:
    """The list inputs that hold something, as members of the sampling parameters. An empty string is no word."""
    lists: dict[str, Any] = {name: _words(tensors, name) for name in WORD_LISTS}
    ids = _array(tensors, "stop_token_ids", np.int32, "INT32")
    if ids is not None:
        if ids.size > MAX_STOP_TOKEN_IDS:  # before millions of them become Python's on Triton's thread
            raise InvalidRequest("stop_token_ids", f"must hold at most {MAX_STOP_TOKEN_IDS} token ids, got {ids.size}")
        lists["stop_token_ids"] = list(token_ids("stop_token_ids", ids.reshape(-1).tolist(), MAX_STOP_TOKEN_IDS))
    return {name: values for name, values in lists.items() if values}


def _words(tensors: Tensors, name: str) -> list[str]:
    words = [word for word in _elements(tensors, name) if word]
    if sum(map(len, words)) > MAX_PARAMETERS_BYTES:
        raise InvalidRequest(name, f"must hold at most {MAX_PARAMETERS_BYTES} bytes")
    try:
        return [word.decode("utf-8") for word in words]
    except UnicodeDecodeError:
        raise InvalidRequest(name, "is not valid UTF-8") from None


def _packed(tensors: Tensors, name: str) -> bytes | None:
    """An INT32 tensor as packed int32, little-endian; None: not given."""
    array = _array(tensors, name, np.int32, "INT32")
    return None if array is None else array.astype("<i4", copy=False).tobytes()


def _bytes(tensors: Tensors, name: str) -> bytes | None:
    """The only element of a BYTES tensor, exactly as it came: trailing zero bytes and all. None: not given."""
    array = _array(tensors, name, np.object_, "BYTES")
    return None if array is None else _as_bytes(name, _only(name, array))


def _bool(tensors: Tensors, name: str) -> bool | None:
    """The only element of a BOOL tensor. None: not given."""
    array = _array(tensors, name, np.bool_, "BOOL")
    return None if array is None else bool(_only(name, array))


def _elements(tensors: Tensors, name: str) -> list[bytes]:
    """All elements of a BYTES tensor; none when it is not given."""
    array = _array(tensors, name, np.object_, "BYTES")
    return [] if array is None else [_as_bytes(name, element) for element in array.reshape(-1)]


def _as_bytes(name: str, element: Any) -> bytes:
    if isinstance(element, bytes):
        return element
    if not isinstance(element, str):
        raise InvalidRequest(name, "must be a tensor of BYTES")
    try:
        return element.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequest(name, "is not valid UTF-8") from None


def _only(name: str, array: Any) -> Any:
    """The only element of an array of any rank."""
    if array.size != 1:
        raise InvalidRequest(name, f"must hold exactly one value, got shape {list(array.shape)}")
    return array.reshape(-1)[0]


def _array(tensors: Tensors, name: str, dtype: type, triton_type: str) -> Any:
    """The array of a tensor, its type checked; None when it is not given."""
    tensor = tensors.get(name)
    if tensor is None:
        return None
    try:
        array = np.asarray(tensor.as_numpy())
    except Exception:
        raise InvalidRequest(name, "can not be read as a tensor") from None
    if array.dtype != dtype:
        raise InvalidRequest(name, f"must be a tensor of {triton_type}")
    return array
