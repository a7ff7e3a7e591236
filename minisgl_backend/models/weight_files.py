"""The files of a model's weights: which they are, where each tensor lies in them, and what tells them from others.

Where it stands in the flow: read before the weights are, also by processes that load no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from minisgl_backend.errors import ModelUnsupported
from minisgl_backend.models.files import is_gguf
from minisgl_backend.models.gguf_file import GgufFile

_HEAD_BYTES = 1 << 20  # most of it that is looked at
_MOST_HEADER_BYTES = 100 << 20  # as the safetensors library has it
_SAMPLES = 1024  # a file
_SAMPLE_BYTES = 512  # 256 values in 16 bits: a light fine-tune may round to the same in most of them


def weight_files(path: Path) -> list[Path]:
    """A GGUF file, or the folder's safetensors that can be read."""
    found = [path] if is_gguf(path) else sorted(path.glob("*.safetensors"))
    return [file for file in found if file.is_file()]  # a broken link is none


def weights_id(path: Path) -> str:
    """Of a model's folder or GGUF file: another one when its weights are others. Raises OSError.

    Names, sizes and times of the files are not enough: a copy may keep its times, and layers of images often have one
    time for all files. So the head of each file and some bytes out of the middle of every tensor go in: a few ms, and
    one read of the disk for each tensor (at most 1,024 a file) where nothing is in memory.
    """
    digest = hashlib.sha256()
    for file in weight_files(path):
        state = file.stat()
        digest.update(json.dumps([file.name, state.st_size, state.st_mtime_ns]).encode())
        with file.open("rb", buffering=0) as opened:
            handle = opened.fileno()
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)  # no more is read than is asked for
            digest.update(os.pread(handle, _HEAD_BYTES, 0))
            for place in _sampled(file, state.st_size):
                middle = (place.start + max(place.start, place.stop - _SAMPLE_BYTES)) // 2
                digest.update(os.pread(handle, _SAMPLE_BYTES, middle))
    return digest.hexdigest()[:16]


def tensor_places(file: Path) -> Mapping[str, range]:
    """The bytes of each tensor, by the file's own names. Empty for a file that is broken: whoever loads it says so."""
    try:
        if is_gguf(file):
            tensors = GgufFile(file).tensors
            return {name: range(one.offset, one.offset + one.size) for name, one in tensors.items()}
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            if size > _MOST_HEADER_BYTES:
                return {}
            entries = json.loads(opened.read(size))
        entries.pop("__metadata__", None)
        data = 8 + size
        return {
            name: range(data + entry["data_offsets"][0], data + entry["data_offsets"][1])
            for name, entry in entries.items()
        }
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, ModelUnsupported):
        return {}


def _sampled(file: Path, size: int) -> list[range]:
    """Parts of the file, one sample each: tensors, or of a file that does not say where they are, equal pieces."""
    places = sorted(tensor_places(file).values(), key=lambda place: place.start)
    piece = max(size // _SAMPLES, _SAMPLE_BYTES)
    parts = places or [range(begin, begin + piece) for begin in range(0, size, piece)]
    return parts[:: -(-len(parts) // _SAMPLES)] if parts else []
