"""Request parameters: which keys are Triton's own, which are ours, and which go to the sampler.

Where it stands in the flow: `tensors.read_request` calls this with `request.parameters()`. Sampling keys are only
separated here; `text/` validates them. The rule for a value given in two places (as an input tensor, in the
`sampling_parameters` object, as a request parameter): it is accepted when they agree, else the request is refused.
Nothing is ever ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minisgl_backend.errors import InvalidRequest, UnsupportedFeature
from minisgl_backend.text.parameters import BOOL_OPTIONS, MAX_PARAMETERS_BYTES, PROMPT_INPUTS
from minisgl_backend.text.values import flag, integer, json_object, read_flag, shown

MAX_TIMEOUT_US = 2**53
"""285 years; HTTP has no larger exact integers."""

_TENSORS_ONLY = (*PROMPT_INPUTS, "operation", "sampling_parameters")

_CONSUMED_BY_TRITON = ("id", "binary_data_output")
"""HTTP hands these on although Triton has acted on them already."""

_SEQUENCES = ("sequence_id", "sequence_start", "sequence_end")


@dataclass(frozen=True)
class RequestParameters:
    """Triton's request parameters, sorted by who acts on them."""

    options: Mapping[str, bool]  # keys of BOOL_OPTIONS
    sampling: Mapping[str, Any]  # not validated
    timeout_us: int  # 0: none


def read_parameters(raw: str) -> RequestParameters:
    """The JSON object of `request.parameters()` → who acts on what. Raises RequestError, naming the key."""
    options: dict[str, bool] = {}
    sampling: dict[str, Any] = {}
    values = json_object(raw or "{}", "parameters", MAX_PARAMETERS_BYTES)
    for key, value in values.items():
        if key in BOOL_OPTIONS:
            options[key] = flag(key, value)
        elif key in _TENSORS_ONLY:
            raise InvalidRequest(key, "must be an input tensor, not a request parameter")
        elif key in _SEQUENCES:
            refuse_sequence()
        elif key not in ("timeout", *_CONSUMED_BY_TRITON) and not key.startswith("triton_"):
            sampling[key] = value
    return RequestParameters(
        options=options,
        sampling=sampling,
        timeout_us=integer("timeout", values.get("timeout", 0), 0, MAX_TIMEOUT_US),
    )


def merge_sampling(tensor: bytes, *others: Mapping[str, Any]) -> bytes:
    """The sampling parameters of all places as one JSON object; empty when there are none.

    `tensor` is the `sampling_parameters` input as it came (empty: not given); given alone it is passed on unread.
    Raises InvalidRequest when a key has different values in two places.
    """
    if not any(others):
        return tensor
    merged = json_object(tensor or b"{}", "sampling_parameters", MAX_PARAMETERS_BYTES)
    try:
        for other in others:
            for key, value in other.items():
                if key in merged and _meaning(merged[key]) != _meaning(value):
                    raise InvalidRequest(_named(key), "has different values in two places of the request")
                merged.setdefault(key, value)
        return json.dumps(merged).encode()
    except RecursionError:
        raise InvalidRequest("sampling_parameters", "is nested too deeply") from None


def merge_option(name: str, tensor: bool | None, parameters: Mapping[str, bool]) -> bool | None:
    """An option from its input tensor or from the request's parameters; None when neither gives it."""
    parameter = parameters.get(name)
    if tensor is not None and parameter is not None and tensor != parameter:
        raise InvalidRequest(name, "has one value as an input and another in the request's parameters")
    return parameter if tensor is None else tensor


def merge_timeout(own: int, parameter: int) -> int:
    """Triton's own timeout (gRPC) and that of the request's parameters (HTTP), microseconds; 0: none."""
    if own and parameter and own != parameter:
        raise InvalidRequest("timeout", "has one value of the request and another in its parameters")
    return own or parameter


def refuse_sequence() -> None:
    """Triton's stateful sequences: each request here stands alone."""
    raise UnsupportedFeature("sequence_id", "sequences are not supported; each request carries its whole prompt")


def _meaning(value: Any) -> Any:
    """A value as it will be read, whether or not it is written as a string: 5 and "5", [1, 2] and "[1,2]"."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value if (truth := read_flag(value)) is None else truth


def _named(key: str) -> str:
    """A key as the name of a field in a message: those of ours are; a client's own may be anything."""
    return key if key.isascii() and key.isidentifier() and len(key) <= 64 else shown(key)
