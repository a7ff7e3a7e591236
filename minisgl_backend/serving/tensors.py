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
from minisgl_backend.serving.arrays import Tensors, array_of, bool_of, bytes_of, elements_of, inputs_of, words_of
from minisgl_backend.serving.outputs import Form, OperationResult, Wanted
from minisgl_backend.serving.parameters import (
    merge_option,
    merge_sampling,
    merge_timeout,
    read_parameters,
)
from minisgl_backend.serving.triton import InferenceRequest
from minisgl_backend.text.parameters import (
    BOOL_OPTIONS,
    MAX_STOP_TOKEN_IDS,
    PROMPT_INPUTS,
    WORD_LISTS,
)
from minisgl_backend.text.values import token_ids

INPUTS = (
    *PROMPT_INPUTS,
    "operation",
    "sampling_parameters",
    *WORD_LISTS,
    "stop_token_ids",
    *BOOL_OPTIONS,
)
"""The inputs that config.pbtxt declares."""


def read_request(request: InferenceRequest, id: RequestId) -> tuple[Request, Form]:
    """Copies everything out of Triton's memory. Raises RequestError, naming the field."""
    tensors = inputs_of(request, INPUTS)
    if any(elements_of(tensors, "image")):
        raise UnsupportedFeature("image", "this model takes no images")
    parameters = read_parameters(request.parameters())
    options = {name: merge_option(name, bool_of(tensors, name), parameters.options) for name in BOOL_OPTIONS}
    message = Request(
        id=id,
        text_input=bytes_of(tensors, "text_input"),
        parameters=merge_sampling(
            bytes_of(tensors, "sampling_parameters") or b"", _lists(tensors), parameters.sampling
        ),
        stream=options["stream"] or False,
        exclude_input_in_output=options["exclude_input_in_output"],
        input_ids=_packed(tensors, "input_ids"),
        messages=bytes_of(tensors, "messages"),
        tools=bytes_of(tensors, "tools"),
        timeout_us=merge_timeout(request.timeout(), parameters.timeout_us),
        return_cumulative_logprob=options["return_cumulative_logprob"] or False,
        parse_output=options["parse_output"] or False,
        operation=bytes_of(tensors, "operation"),
    )
    if message.operation is None:
        return message, _wanted(options)
    _refuse_options(options, message.timeout_us)
    return message, OperationResult()


def _refuse_options(options: Mapping[str, bool | None], timeout_us: int) -> None:
    """What only a generation can heed, when it asks for something."""
    asked = [name for name, value in options.items() if value]
    if asked or timeout_us:
        raise InvalidRequest((asked or ["timeout"])[0], "is of a generation; this request names an operation")


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
    lists: dict[str, Any] = {name: words_of(tensors, name) for name in WORD_LISTS}
    ids = array_of(tensors, "stop_token_ids", np.int32, "INT32")
    if ids is not None:
        if ids.size > MAX_STOP_TOKEN_IDS:  # before millions of them become Python's on Triton's thread
            raise InvalidRequest("stop_token_ids", f"must hold at most {MAX_STOP_TOKEN_IDS} token ids, got {ids.size}")
        lists["stop_token_ids"] = list(token_ids("stop_token_ids", ids.reshape(-1).tolist(), MAX_STOP_TOKEN_IDS))
    return {name: values for name, values in lists.items() if values}


def _packed(tensors: Tensors, name: str) -> bytes | None:
    """An INT32 tensor as packed int32, little-endian; None: not given."""
    array = array_of(tensors, name, np.int32, "INT32")
    return None if array is None else array.astype("<i4", copy=False).tobytes()
