"""The shared object of a level in this process: its operators and its recordings' C functions."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

from minisgl_backend.kernels.native.levels import Level


class Library:
    """One level's kernels, loaded. `ops`: its operators."""

    def __init__(self, level: Level, path: Path) -> None:
        torch.ops.load_library(str(path))
        self.level = level
        self.ops: Any = getattr(torch.ops, level.namespace)
        self.c = ctypes.CDLL(str(path))


@cache
def load_library(level: Level, path: Path) -> Library:
    """path: of `build`. Once per process: operators can not be registered twice."""
    return Library(level, path)
