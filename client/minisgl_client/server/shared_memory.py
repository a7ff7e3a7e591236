"""The shared memory of tritonserver's Python backend: named by us, so that it can be removed after a crash.

The backend speaks with its stubs through files in /dev/shm and removes them when it ends well. A server that was
killed leaves a few MiB behind each time, until a container's 64 MB are full and no model loads. Where it stands in the
flow: `minisgl serve` gives the server a prefix of its own, and calls `remove_regions` when no process of it is left.
"""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path

FOLDER = Path("/dev/shm")


def new_prefix() -> str:
    """Of the names of one server's files; no other server has it."""
    return f"minisgl-{uuid.uuid4().hex[:12]}-"


def backend_option(prefix: str) -> str:
    """The option of tritonserver that names its files."""
    return f"--backend-config=python,shm-region-prefix-name={prefix}"


def remove_regions(prefix: str, folder: Path = FOLDER) -> None:
    """Removes what a server left. Only when no process of it runs: a live one opens its files again to grow."""
    for region in folder.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # gone already, or not ours
            region.unlink()
