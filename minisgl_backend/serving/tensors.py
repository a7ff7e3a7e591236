"""Triton's request → `messages.client.Request`.

Where it stands in the flow: the bridge calls `read_request` for every request of an `execute` call, on Triton's
thread. It checks what only Triton's side can know (tensors, shapes, types, the places a parameter may stand in);
what the values mean is validated by `text/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from minisgl_backend.errors import InvalidRequest, UnsupportedFeature
from minisgl_backend.messages.client import Request
from minisgl_backend.messages.ids import RequestId
from minisgl_backend.serving.parameters import (
    merge_option,
    merge_sampling,
    read_parameters,
    refuse_sequence,
    refuse_timeout,
)
from minisgl_backend.serving.triton import InferenceRequest, Tensor

INPUTS = ("text_input", "stream", "exclude_input_in_output", "sampling_parameters")
"""The inputs that config.pbtxt declares."""


def read_request(request: InferenceRequest, id: RequestId) -> Request:
    """Copies everything out of Triton's memory. Raises RequestError, naming the field."""
    tensors = {tensor.name(): tensor for tensor in request.inputs()}
    for name in tensors:
        if name not in INPUTS:
            raise UnsupportedFeature(name, "is not an input of this model")
    if request.flags() or request.correlation_id() not in (0, "", "0"):
        refuse_sequence()
    refuse_timeout(request.timeout())
    parameters = read_parameters(request.parameters())
    prompt = _bytes(tensors, "text_input")
    if prompt is None:
        raise InvalidRequest("text_input", "is missing")
    exclude = "exclude_input_in_output"
    return Request(
        id=id,
        text_input=prompt,
        parameters=merge_sampling(_bytes(tensors, "sampling_parameters") or b"", parameters.sampling),
        stream=merge_option("stream", _bool(tensors, "stream"), parameters.options) or False,
        exclude_input_in_output=merge_option(exclude, _bool(tensors, exclude), parameters.options),
    )


def _bytes(tensors: Mapping[str, Tensor], name: str) -> bytes | None:
    """The only element of a BYTES tensor, exactly as it came: trailing zero bytes and all. None: not given."""
    element = _element(tensors, name)
    if element is None or isinstance(element, bytes):
        return element
    if isinstance(element, str):
        try:
            return element.encode("utf-8")
        except UnicodeEncodeError:
            raise InvalidRequest(name, "is not valid UTF-8") from None
    raise InvalidRequest(name, "must be a BYTES tensor")


def _bool(tensors: Mapping[str, Tensor], name: str) -> bool | None:
    element = _element(tensors, name)
    if element is None or isinstance(element, bool):
        return element
    raise InvalidRequest(name, "must be a BOOL tensor")


def _element(tensors: Mapping[str, Tensor], name: str) -> Any:
    """The only element of a tensor of any rank, as a Python object; None when the tensor is not given."""
    tensor = tensors.get(name)
    if tensor is None:
        return None
    try:
        array = np.asarray(tensor.as_numpy())
    except Exception:
        raise InvalidRequest(name, "can not be read as a tensor") from None
    if array.size != 1:
        raise InvalidRequest(name, f"must hold exactly one value, got shape {list(array.shape)}")
    element = array.reshape(-1)[0]
    return element.item() if isinstance(element, np.generic) else element
