"""Request parameters: which keys are Triton's own, which are ours, and which go to the sampler.

Where it stands in the flow: `tensors.read_request` calls this with `request.parameters()`. Sampling keys are only
separated here; `text/` validates them. The rule for a value given in two places (as an input tensor and as a request
parameter): it is accepted when both agree, else the request is refused. Nothing is ever ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minisgl_backend.errors import InvalidRequest, UnsupportedFeature

MAX_BYTES = 1 << 20
"""Of the JSON object of either place. The stub reads it on Triton's own thread, so the bound comes before parsing."""

BOOL_OPTIONS = ("stream", "exclude_input_in_output")
"""Inputs that may also be given as request parameters."""

_TENSORS_ONLY = ("text_input", "sampling_parameters")

_CONSUMED_BY_TRITON = ("id", "binary_data_output")
"""HTTP hands these on although Triton has acted on them already."""

_SEQUENCES = ("sequence_id", "sequence_start", "sequence_end")

_NOT_BUILT = (
    "image",
    "input_ids",
    "messages",
    "tools",
    "stop_words",
    "bad_words",
    "return_finish_reason",
    "return_cumulative_logprob",
    "return_logprobs",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_output_ids",
    "return_perf_metrics",
)
"""Inputs of the dialect that this version does not declare: over /generate they arrive as request parameters."""


@dataclass(frozen=True)
class RequestParameters:
    """Triton's request parameters, sorted by who acts on them."""

    options: Mapping[str, bool]  # keys of BOOL_OPTIONS
    sampling: Mapping[str, Any]  # not validated


def read_parameters(raw: str) -> RequestParameters:
    """The JSON object of `request.parameters()` → who acts on what.

    Raises InvalidRequest, or UnsupportedFeature for keys that are known and not built.
    """
    options: dict[str, bool] = {}
    sampling: dict[str, Any] = {}
    for key, value in _json_object(raw, "parameters").items():
        if key in BOOL_OPTIONS:
            options[key] = _bool(key, value)
        elif key in _TENSORS_ONLY:
            raise InvalidRequest(key, "must be an input tensor, not a request parameter")
        elif key in _SEQUENCES:
            refuse_sequence()
        elif key == "timeout":
            refuse_timeout(value)
        elif key == "priority":
            _refuse_priority(value)
        elif key in _NOT_BUILT:
            raise UnsupportedFeature(key)
        elif key not in _CONSUMED_BY_TRITON and not key.startswith("triton_"):
            sampling[key] = value
    return RequestParameters(options, sampling)


def merge_sampling(tensor: bytes, parameters: Mapping[str, Any]) -> bytes:
    """The sampling parameters of both places as one JSON object; empty when there are none.

    `tensor` is the `sampling_parameters` input as it came (empty: not given); given alone it is passed on unread.
    Raises InvalidRequest when a key has different values in the two places.
    """
    if not parameters:
        return tensor
    merged = _json_object(tensor, "sampling_parameters")
    for key, value in parameters.items():
        if key in merged and not _agree(merged[key], value):
            raise InvalidRequest(key, "has one value in sampling_parameters and another in the request's parameters")
        merged.setdefault(key, value)
    return json.dumps(merged).encode()


def merge_option(name: str, tensor: bool | None, parameters: Mapping[str, bool]) -> bool | None:
    """An option from its input tensor or from the request's parameters; None when neither gives it."""
    parameter = parameters.get(name)
    if tensor is not None and parameter is not None and tensor != parameter:
        raise InvalidRequest(name, "has one value as an input and another in the request's parameters")
    return parameter if tensor is None else tensor


def refuse_sequence() -> None:
    """Triton's stateful sequences: each request here stands alone."""
    raise UnsupportedFeature("sequence_id", "sequences are not supported; each request carries its whole prompt")


def refuse_timeout(value: Any) -> None:
    """A deadline of 0 is none; any other is not kept by this version, so it is refused."""
    if value not in (0, "0"):
        raise UnsupportedFeature("timeout", "deadlines are not supported by this version; cancel the request instead")


def _refuse_priority(value: Any) -> None:
    if value not in (0, "0"):
        raise UnsupportedFeature("priority", "priorities are not supported by this version")


def _bool(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise InvalidRequest(name, "must be true or false")


def _agree(one: Any, other: Any) -> bool:
    """Equal, also when one of them is written as a string: 5 and "5"."""
    return bool(one == other) or _written(one) == _written(other)


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _json_object(raw: str | bytes, field: str) -> dict[str, Any]:
    if len(raw) > MAX_BYTES:
        raise InvalidRequest(field, f"must hold at most {MAX_BYTES} bytes, got {len(raw)}")

    def without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values:
                raise InvalidRequest(field, f"names {key[:64]!a} twice")
            values[key] = value
        return values

    try:
        value = json.loads(raw, object_pairs_hook=without_duplicates) if raw else {}
    except (ValueError, RecursionError):
        raise InvalidRequest(field, "is not valid JSON") from None
    if not isinstance(value, dict):
        raise InvalidRequest(field, "must be a JSON object")
    return value
