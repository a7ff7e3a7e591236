"""Weights on their way from the disk to the page cache, while something else takes time.

Where it stands in the flow: called by the worker just before it imports torch. Loads no torch.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from minisgl_backend.device.machine import free_memory_bytes
from minisgl_backend.models.files import is_gguf

_SHARE = 0.5  # of the free memory: weights that do not fit would only push one another out


def read_ahead(path: Path) -> threading.Thread | None:
    """Asks the kernel to read a folder's safetensors, or a GGUF file, from a thread of its own, which ends by itself.

    Returns that thread; None when there is nothing to read or no room for it. What can not be opened is left to
    whoever loads it.
    """
    files = weight_files(path)
    size_bytes = sum(file.stat().st_size for file in files)
    if not files or size_bytes > free_memory_bytes() * _SHARE:
        return None
    thread = threading.Thread(target=_ask, args=(files,), name="minisgl-read-ahead", daemon=True)
    thread.start()
    return thread


def weight_files(path: Path) -> list[Path]:
    """A GGUF file, or the folder's safetensors that can be read."""
    found = [path] if is_gguf(path) else sorted(path.glob("*.safetensors"))
    return [file for file in found if file.is_file()]  # a broken link is none


def _ask(files: list[Path]) -> None:
    for file in files:
        with contextlib.suppress(OSError), file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
