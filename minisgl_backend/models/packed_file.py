"""Packed weights, kept in a file beside the fetched models and mapped: who comes second packs nothing, and engines of
one machine share the pages.

    [tensor] [tensor] …   each from a whole page on
    index, tail           see packed_index.py

A file gets its name when it is whole and on the disk: pages that a crash has left out would be zeros, and weights of 0
are no error. The name says which model, weights and layout it is of (`packed_path`).
While one process packs, others of the same model wait for it. Where nothing can be written, weights are packed into
memory of the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import math
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

import torch
from torch import Tensor

from minisgl_backend.kernels.native.packed import LAYOUT
from minisgl_backend.models.packed_index import PackedEntries, packed_folder, packed_suffix, read_index, write_index

_LEFT_FREE_BYTES = 1 << 30  # of the disk
_KEPT_DAYS = 30  # since a file was last opened
_REPLACED_KEPT_DAYS = 1  # of one whose model has other weights by now; two machines may see two models at one path

Progress = Callable[[str], None]


class PackedStore(Protocol):
    """Where packed weights lie, by name."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, fill: Callable[[Tensor], None]) -> Tensor:
        """What is kept under the name, else what `fill` writes. 64 bytes aligned, not to be written to."""
        ...


class PackedInMemory:
    """See PackedStore: keeps nothing."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, fill: Callable[[Tensor], None]) -> Tensor:
        return _filled(torch.empty(shape, dtype=dtype), fill)


def packed_path(cache: Path, model: Path, dtype: torch.dtype, quantization: str, part: str = "") -> Path:
    """The file of a model's folder or GGUF file under `cache`: OF-WEIGHTS-DTYPE.bin, the second by what is in the
    weights' files. part: which of its weights, where they are not all. Raises OSError.
    """
    of = json.dumps([LAYOUT, str(model.resolve()), str(dtype), quantization, *([part] if part else [])])
    name = hashlib.sha256(of.encode()).hexdigest()[:16]
    return packed_folder(cache) / f"{name}{packed_suffix(model, str(dtype).removeprefix('torch.'))}"


@contextmanager
def open_packed(path: Path, progress: Progress = lambda line: None) -> Iterator[PackedStore]:
    """The store in a file of packed_path. On leaving it normally, what was packed gets that name.

    The tensors that were taken stay valid. progress: a line where weights are packed or waited for, and where they can
    not be kept.
    """
    with contextlib.ExitStack() as stack:
        store: PackedStore = PackedInMemory()
        try:
            store = _open_whole(path, stack) or _begin(path, stack, progress)
        except OSError as error:
            progress(f"packed weights are not kept: {error}")
        yield store
        if isinstance(store, _PackedWriter):
            store.commit()


def _begin(path: Path, stack: contextlib.ExitStack, progress: Progress) -> PackedStore:
    """Waits for who packs the same, and then takes that, or packs in turn."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = stack.enter_context(path.with_suffix(".lock").open("w"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        progress("waiting for another process, which packs these weights")
        fcntl.flock(lock, fcntl.LOCK_EX)
    return _open_whole(path, stack) or stack.enter_context(_PackedWriter(path, progress))


class _PackedFile:
    """A whole file."""

    def __init__(self, file: BinaryIO, entries: PackedEntries) -> None:
        self._file = file
        self._entries = entries

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, fill: Callable[[Tensor], None]) -> Tensor:
        offset, kept = self._entries.get(name, (0, ()))
        if kept != shape:
            return PackedInMemory().take(name, shape, dtype, fill)
        return _mapped(self._file, offset, shape, dtype, mmap.ACCESS_COPY)


class _PackedWriter:
    """A file that grows under another name."""

    def __init__(self, path: Path, progress: Progress) -> None:
        self._path = path
        self._progress = progress
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
        self._made = Path(name)
        self._file: BinaryIO | None = os.fdopen(handle, "w+b")
        self._entries: PackedEntries = {}
        self._began = time.monotonic()
        progress("packing weights, once")

    def __enter__(self) -> _PackedWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._made.unlink(missing_ok=True)
        if self._file is not None:
            self._file.close()

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, fill: Callable[[Tensor], None]) -> Tensor:
        if self._file is None:
            return PackedInMemory().take(name, shape, dtype, fill)
        try:
            offset = _next_page(self._file)
            _make_room(self._file, offset, math.prod(shape) * dtype.itemsize)
        except OSError as error:
            self._give_up(error)
            return PackedInMemory().take(name, shape, dtype, fill)
        _filled(_mapped(self._file, offset, shape, dtype, mmap.ACCESS_WRITE), fill)
        self._entries[name] = offset, shape
        return _mapped(self._file, offset, shape, dtype, mmap.ACCESS_COPY)

    def commit(self) -> None:
        """Gives the file its name."""
        if self._file is None:
            return
        try:
            write_index(self._file, self._entries)
            self._file.flush()
            os.fsync(self._file.fileno())
            self._made.replace(self._path)
        except OSError as error:
            self._give_up(error)
            return
        self._progress(f"packed weights in {time.monotonic() - self._began:.1f} s")
        _give_heap_back()
        _prune(self._path)

    def _give_up(self, error: OSError) -> None:
        assert self._file is not None
        self._progress(f"packed weights are not kept: {error}")
        with contextlib.suppress(OSError):  # what could not be written is tried once more
            self._file.close()
        self._file = None


def _open_whole(path: Path, stack: contextlib.ExitStack) -> _PackedFile | None:
    """None: there is none, or it is broken."""
    if not path.exists():
        return None
    file = stack.enter_context(path.open("rb"))
    try:
        entries = read_index(file)
    except (ValueError, TypeError, AttributeError):
        return None
    with contextlib.suppress(OSError):  # it belongs to somebody else
        os.utime(path)
    return _PackedFile(file, entries)


def _mapped(file: BinaryIO, offset: int, shape: tuple[int, ...], dtype: torch.dtype, access: int) -> Tensor:
    """A part of a file. Who only reads maps it copy on write: torch takes no memory that it could not write to."""
    part = mmap.mmap(file.fileno(), math.prod(shape) * dtype.itemsize, access=access, offset=offset)
    part.madvise(mmap.MADV_WILLNEED)
    return torch.frombuffer(part, dtype=dtype).view(shape)


def _filled(tensor: Tensor, fill: Callable[[Tensor], None]) -> Tensor:
    fill(tensor)
    return tensor


def _next_page(file: BinaryIO) -> int:
    """Goes to the end, and on to where a mapping can begin."""
    end = file.seek(0, os.SEEK_END)
    return file.seek(-(-end // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY)


def _make_room(file: BinaryIO, offset: int, size_bytes: int) -> None:
    """Raises OSError. Without room that is set aside, a write to the mapping could end the process."""
    disk = os.fstatvfs(file.fileno())
    if disk.f_bavail * disk.f_frsize < size_bytes + _LEFT_FREE_BYTES:
        raise OSError(errno.ENOSPC, "less than 1 GiB of the disk would be left")
    os.posix_fallocate(file.fileno(), offset, size_bytes)


def _prune(new: Path) -> None:
    """Removes what nobody has opened for long, also what a killed process left, and sooner what `new` is instead of.

    Who has mapped a file keeps it.
    """
    of = new.name.partition("-")[0]
    for file in new.parent.iterdir():
        days = _REPLACED_KEPT_DAYS if file.name.startswith(f"{of}-") else _KEPT_DAYS
        with contextlib.suppress(OSError):
            if file != new and file.stat().st_mtime < time.time() - days * 86400:
                file.unlink()


def _give_heap_back() -> None:
    """What converting blocks of weights has left, 190 MB of SmolLM2. glibc keeps it otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
