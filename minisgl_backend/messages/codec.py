"""Messages ↔ bytes: msgpack, decoded against the schema, never unpickled."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """One message → one frame."""
    return _encoder.encode(message)


class Decoder(Generic[M]):
    """Decodes frames of one union of messages. Raises msgspec.DecodeError on anything else."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union)

    def decode(self, frame: bytes) -> M:
        return self._decoder.decode(frame)
