"""Input tensors → Python values: shapes and types are checked here, meanings elsewhere.

Where it stands in the flow: the readers of all dialects (tensors.py, tensorrt.py) use it, on Triton's thread. What is
kept is copied out of Triton's memory. Errors are InvalidRequest or UnsupportedFeature and begin with the input's name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from minisgl_backend.errors import InvalidRequest, UnsupportedFeature
from minisgl_backend.serving.parameters import refuse_sequence
from minisgl_backend.serving.triton import InferenceRequest, Tensor
from minisgl_backend.text.parameters import MAX_PARAMETERS_BYTES

Tensors = Mapping[str, Tensor]


def inputs_of(request: InferenceRequest, declared: Collection[str]) -> Tensors:
    """The inputs by name, all of them declared ones; of a request that is no part of a sequence."""
    tensors = {tensor.name(): tensor for tensor in request.inputs()}
    for name in tensors:
        if name not in declared:
            raise UnsupportedFeature(name, "is not an input of this model")
    if request.flags() or request.correlation_id() not in (0, "", "0"):
        refuse_sequence()
    return tensors


def words_of(tensors: Tensors, name: str) -> list[str]:
    """The elements of a BYTES tensor as texts; an empty one is no word."""
    words = [word for word in elements_of(tensors, name) if word]
    if sum(map(len, words)) > MAX_PARAMETERS_BYTES:
        raise InvalidRequest(name, f"must hold at most {MAX_PARAMETERS_BYTES} bytes")
    try:
        return [word.decode("utf-8") for word in words]
    except UnicodeDecodeError:
        raise InvalidRequest(name, "is not valid UTF-8") from None


def bytes_of(tensors: Tensors, name: str) -> bytes | None:
    """The only element of a BYTES tensor, exactly as it came: trailing zero bytes and all. None: not given."""
    array = array_of(tensors, name, np.object_, "BYTES")
    return None if array is None else _as_bytes(name, only(name, array))


def bool_of(tensors: Tensors, name: str) -> bool | None:
    """The only element of a BOOL tensor. None: not given."""
    array = array_of(tensors, name, np.bool_, "BOOL")
    return None if array is None else bool(only(name, array))


def elements_of(tensors: Tensors, name: str) -> list[bytes]:
    """All elements of a BYTES tensor; none when it is not given."""
    array = array_of(tensors, name, np.object_, "BYTES")
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


def only(name: str, array: Any) -> Any:
    """The only element of an array of any rank."""
    if array.size != 1:
        raise InvalidRequest(name, f"must hold exactly one value, got shape {list(array.shape)}")
    return array.reshape(-1)[0]


def array_of(tensors: Tensors, name: str, dtype: type, triton_type: str) -> Any:
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
