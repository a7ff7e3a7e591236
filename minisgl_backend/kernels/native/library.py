"""The shared object of a level in this process: its operators, and the C functions of its recordings."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from minisgl_backend.kernels.native.build import CompilerMissing, build
from minisgl_backend.kernels.native.levels import Level, best_level, why_no_level


class Library:
    """One level's kernels, loaded. Recordings are those of src/launch.h, by their address; see recording.py."""

    def __init__(self, level: Level, path: Path) -> None:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
        self.level = level
        self.ops: Any = getattr(torch.ops, level.namespace)
        self._c = ctypes.CDLL(str(path))
        self._c.minisgl_record_end.restype = ctypes.c_void_p
        self._c.minisgl_steps.restype = ctypes.c_int64
        for name in ("steps", "replay", "free"):
            getattr(self._c, f"minisgl_{name}").argtypes = [ctypes.c_void_p]

    def record_begin(self) -> None:
        """From here on launches of this thread are kept, and tensors that operators make come from a pool."""
        failed = self._c.minisgl_record_begin()
        assert not failed, "this thread records already"

    def record_end(self) -> int:
        """The recording, which is the caller's until `free`."""
        recording = self._c.minisgl_record_end()
        assert recording, "this thread does not record"
        return int(recording)

    def steps(self, recording: int) -> int:
        return int(self._c.minisgl_steps(recording))

    def replay(self, recording: int) -> None:
        self._c.minisgl_replay(recording)

    def free(self, recording: int) -> None:
        self._c.minisgl_free(recording)


_LOADED: dict[Level, Library] = {}  # as torch's own table of operators, where none can be registered twice
_LOADING = threading.Lock()


def load_library(level: Level, path: Path) -> Library:
    """path: of `build`. A process keeps the first one of a level, also when the sources are others meanwhile."""
    with _LOADING:
        if level not in _LOADED:
            _LOADED[level] = Library(level, path)
        return _LOADED[level]


def open_library(cache_folder: Path, progress: Callable[[str], None] = lambda line: None) -> Library | None:
    """That of this machine's best level, built if it is not there; None: progress has been told why, and what it costs.

    Raises BuildFailed: a compiler that fails on our sources is a fault of ours.
    """
    level = best_level()
    if level is None:
        progress(f"{why_no_level()}: torch's are used, several times slower")
        return None
    try:
        return load_library(level, build(level, cache_folder, progress))
    except (CompilerMissing, OSError) as error:
        progress(f"{error}: our kernels can not be built; torch's are used, several times slower")
        return None
