"""Token ids on the wire: int32, little-endian, in one bytes object.

A prompt of a hundred thousand tokens is then one memcpy for msgpack instead of a hundred thousand ints.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable


def pack_tokens(ids: Iterable[int]) -> bytes:
    """ids (each 0 … 2**31 - 1) → 4 bytes per id."""
    packed = array("i", ids)
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> array[int]:
    """The inverse of `pack_tokens`: a new array('i') owned by the caller."""
    ids: array[int] = array("i")
    ids.frombytes(packed)
    if sys.byteorder != "little":
        ids.byteswap()
    return ids


def count_tokens(packed: bytes) -> int:
    """Number of ids in a packed run."""
    return len(packed) // 4
