"""Weights on their way from the disk to the page cache, while something else takes time.

Where it stands in the flow: called by the worker just before it imports torch. Loads no torch.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

from minisgl_backend.device.machine import free_memory_bytes
from minisgl_backend.models.files import is_gguf
from minisgl_backend.models.packed_index import read_index
from minisgl_backend.models.weight_files import tensor_places, weight_files

_SHARE = 0.5  # of the free memory: weights that do not fit would only push one another out

Part = tuple[Path, range]
"""Bytes of a file."""


def read_ahead(path: Path, packed: Callable[[], Path | None] = lambda: None) -> threading.Thread | None:
    """Asks the kernel to read a folder's safetensors, or a GGUF file, from a thread of its own, which ends by itself.

    packed: asked in that thread for a file of packed weights, which is read instead of the tensors that it holds.
    Returns the thread; None when there is nothing to read. Nothing is asked for where there is no room. What can not be
    opened is left to whoever loads it.
    """
    if not weight_files(path):
        return None
    thread = threading.Thread(target=_ask, args=(path, packed), name="minisgl-read-ahead", daemon=True)
    thread.start()
    return thread


def parts_to_read(path: Path, packed: Path | None) -> list[Part]:
    """What a load reads. Raises OSError.

    Beside packed weights that is what they do not hold. A table that is packed as the head counts as held: only rows of
    it are looked up. And of a GGUF file nothing is read: its tensors have other names, and those left are small.
    """
    files = weight_files(path)
    kept = _names_in(packed) if packed is not None else frozenset()
    if packed is None or not kept:
        return [(file, range(file.stat().st_size)) for file in files]
    parts = [(packed, range(packed.stat().st_size))]
    if not is_gguf(path):
        for file in files:
            parts += [(file, place) for name, place in tensor_places(file).items() if name not in kept]
    return parts


def _names_in(packed: Path) -> frozenset[str]:
    """The tensors of the checkpoint that were packed; none: the file is broken, and will be made anew."""
    with packed.open("rb") as file:
        try:
            entries = read_index(file)
        except (ValueError, TypeError, AttributeError):
            return frozenset()
    return frozenset(name for product in entries for name in product.split("|"))


def _ask(path: Path, packed: Callable[[], Path | None]) -> None:
    with contextlib.suppress(OSError):
        parts = parts_to_read(path, packed())
        if sum(len(place) for _, place in parts) > free_memory_bytes() * _SHARE:
            return
        for file, place in parts:
            with contextlib.suppress(OSError), file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), place.start, len(place), os.POSIX_FADV_WILLNEED)
