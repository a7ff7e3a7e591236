"""What is in a file of packed weights, and which file is of which weights: without torch (see packed_file.py).

index     JSON: name → where it begins, shape
tail      bytes of the index (8, little-endian), then the mark
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import BinaryIO

from minisgl_backend.models.weight_files import weights_id

PackedEntries = dict[str, tuple[int, tuple[int, ...]]]
"""name → offset in bytes, shape. A product of several weights has their names with `|` between them."""

_MARK = b"minisgl\1"
_TAIL_BYTES = 16


def packed_folder(cache: Path) -> Path:
    """Where the files lie below the cache folder."""
    return cache / "packed"


def packed_suffix(model: Path, dtype: str) -> str:
    """How the names of the files of these weights end. dtype: torch's name; `*`: of any, for a glob. Raises OSError."""
    return f"-{weights_id(model)}-{dtype}.bin"


def last_packed(cache: Path, model: Path, dtype: str) -> Path | None:
    """The file of these weights that was opened last. Raises OSError."""
    found = list(packed_folder(cache).glob(f"*{packed_suffix(model, dtype)}"))
    return max(found, key=lambda file: file.stat().st_mtime_ns, default=None)


def write_index(file: BinaryIO, entries: PackedEntries) -> None:
    """At the end. Raises OSError."""
    index = json.dumps(entries).encode()
    file.seek(0, os.SEEK_END)
    file.write(index + len(index).to_bytes(8, "little") + _MARK)


def read_index(file: BinaryIO) -> PackedEntries:
    """Raises ValueError, TypeError or AttributeError where it is none."""
    size = file.seek(0, os.SEEK_END)
    if size < _TAIL_BYTES:
        raise ValueError("too short")
    file.seek(size - _TAIL_BYTES)
    tail = file.read()
    begin = size - _TAIL_BYTES - int.from_bytes(tail[:8], "little")
    if tail[8:] != _MARK or begin < 0:
        raise ValueError("not whole")
    file.seek(begin)
    index = json.loads(file.read(size - _TAIL_BYTES - begin))
    return {str(name): (int(offset), tuple(shape)) for name, (offset, shape) in index.items()}
