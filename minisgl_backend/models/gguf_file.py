"""A GGUF file (llama.cpp's format, versions 2 and 3): its metadata, and where each tensor lies. Pure, no torch.

    magic, version, counts │ metadata: key, type, value … │ tensors: name, dimensions, type, offset … │ padding │ data

Where it stands in the flow: opened by whoever needs a part of the model, several times at a start, in processes that
load no torch. The `gguf` package's own reader makes an array object of every string: 5 s for the vocabulary of the
small model and 16 s for Qwen's (beside other work, two cores), where this needs a tenth of a second. What is read here
is compared with that package in the tests. The file may be a stranger's: every length is checked before it is used.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl_backend.errors import ModelUnsupported
from minisgl_backend.layers.quant.gguf_types import BLOCK_TYPES, BlockType

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_ENTRIES = 1 << 20  # of metadata, or of tensors: far beyond any model
_MOST_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies. shape: as torch counts, the last dimension is the one that is contiguous."""

    type: BlockType
    shape: tuple[int, ...]
    offset: int  # bytes, of the file
    size: int  # bytes


class GgufFile:
    """Metadata and tensors of one file. Raises ModelUnsupported naming the file and what is wrong with it.

    metadata: key → number, bool, str, or list of one of these. tensors: by llama.cpp's names, in the file's order.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                self.metadata, self.tensors = _Reader(data, path.name).read()
        except (OSError, ValueError, struct.error, IndexError, UnicodeDecodeError) as error:  # ValueError: it is empty
            raise ModelUnsupported(f"{path.name} is truncated or no GGUF file: {error}") from None


class _Reader:
    """Goes through the head of a file once."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self._data = data
        self._name = name
        self._at = 0

    def read(self) -> tuple[Mapping[str, Any], Mapping[str, GgufTensor]]:
        if self._take(4) != _MAGIC:
            raise ModelUnsupported(f"{self._name} is no GGUF file")
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise ModelUnsupported(f"{self._name}: GGUF version {version} is not supported; 2 and 3 are, little-endian")
        num_tensors, num_entries = self._count("Q"), self._count("Q")
        metadata = {}
        for _ in range(num_entries):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        found = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment % 8:
            raise ModelUnsupported(f"{self._name}: general.alignment must be a small multiple of 8, got {alignment!r}")
        begin = -(-self._at // alignment) * alignment
        tensors = {}
        for name, kind, shape, offset in found:
            if offset % alignment:
                raise ModelUnsupported(f"{self._name}: tensor {name!r} begins at no multiple of {alignment}")
            tensor = self._placed(name, kind, shape, begin + offset)
            if name in tensors:
                raise ModelUnsupported(f"{self._name} holds tensor {name!r} twice")
            tensors[name] = tensor
        return metadata, tensors

    def _placed(self, name: str, kind: int, shape: tuple[int, ...], offset: int) -> GgufTensor:
        if kind not in BLOCK_TYPES:
            raise ModelUnsupported(
                f"{self._name}: tensor {name!r} has type {_type_name(kind)}; "
                f"{', '.join(block.name for block in BLOCK_TYPES.values())} are read"
            )
        block = BLOCK_TYPES[kind]
        if not shape or 0 in shape or shape[-1] % block.values:
            raise ModelUnsupported(f"{self._name}: rows of {name!r} {list(shape)} are no whole {block.name} blocks")
        values = 1
        for size in shape:
            values *= size
        tensor = GgufTensor(block, shape, offset, values // block.values * block.bytes)
        if offset + tensor.size > len(self._data):
            raise ModelUnsupported(f"{self._name} is truncated: tensor {name!r} ends beyond the file")
        return tensor

    def _tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name, dimensions = self._string(), self._scalar("I")
        if dimensions > _MOST_DIMENSIONS:
            raise ModelUnsupported(f"{self._name}: tensor {name!r} has {dimensions} dimensions")
        shape = tuple(reversed(struct.unpack(f"<{dimensions}Q", self._take(8 * dimensions))))
        return name, self._scalar("I"), shape, self._scalar("Q")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(self._letter(kind))
        inner, length = self._scalar("I"), self._scalar("Q")
        if inner == _STRING:
            return self._strings(length)
        letter = self._letter(inner)
        return list(struct.unpack(f"<{length}{letter}", self._take(struct.calcsize("<" + letter) * length)))

    def _letter(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ModelUnsupported(f"{self._name}: a value of the metadata has the unknown type {kind}")
        return _SCALARS[kind]

    def _strings(self, length: int) -> list[str]:
        """The bulk of a head, hundreds of thousands: in one loop."""
        data, at, size = self._data, self._at, struct.Struct("<Q")
        if length * size.size > len(data) - at:
            raise ModelUnsupported(f"{self._name} is truncated")
        strings = []
        for _ in range(length):
            end = at + 8 + size.unpack_from(data, at)[0]
            if end > len(data):
                raise ModelUnsupported(f"{self._name} is truncated")
            strings.append(data[at + 8 : end].decode("utf-8", "replace"))
            at = end
        self._at = at
        return strings

    def _string(self) -> str:
        return self._take(self._scalar("Q")).decode("utf-8", "replace")

    def _count(self, letter: str) -> int:
        count = int(self._scalar(letter))
        if count > _MOST_ENTRIES:
            raise ModelUnsupported(f"{self._name} names {count} entries: it is damaged or no GGUF file")
        return count

    def _scalar(self, letter: str) -> Any:
        return struct.unpack("<" + letter, self._take(struct.calcsize("<" + letter)))[0]

    def _take(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise ModelUnsupported(f"{self._name} is truncated")
        taken = self._data[self._at : self._at + size]
        self._at += size
        return taken


def _type_name(kind: int) -> str:
    """For a message: the gguf package knows all there are."""
    from gguf import GGMLQuantizationType

    try:
        return str(GGMLQuantizationType(kind).name)
    except ValueError:
        return str(kind)
