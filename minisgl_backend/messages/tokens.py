"""Token ids on the wire: int32, little-endian, in one bytes object. What is told of tokens: float32, likewise.

A prompt of a hundred thousand tokens is then one memcpy for msgpack instead of a hundred thousand ints.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import TypeVar

_Number = TypeVar("_Number", int, float)


def pack_tokens(ids: Iterable[int]) -> bytes:
    """ids (each 0 … 2**31 - 1) → 4 bytes per id."""
    packed = array("i", ids)
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> array[int]:
    """The inverse of `pack_tokens`: a new array('i') owned by the caller."""
    return _unpacked(array("i"), packed)


def unpack_floats(packed: bytes) -> array[float]:
    """float32 values: a new array('f') owned by the caller."""
    return _unpacked(array("f"), packed)


def _unpacked(values: array[_Number], packed: bytes) -> array[_Number]:
    """Appends to `values`, which is returned."""
    values.frombytes(packed)
    if sys.byteorder != "little":
        values.byteswap()
    return values


def count_tokens(packed: bytes) -> int:
    """Number of ids in a packed run."""
    return len(packed) // 4
