"""Small arrays on their way between host and device, without making either wait for the other.

A device copies by itself from and to pinned memory only, and while it does the host must leave that memory alone. So
arrays go up through buffers in rotation: each comes round again when the copy from it is done, which the host waits
for. What comes down has a buffer until it is read. On a CPU nothing is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl_backend.device.streams import PASSED, Event, Later, Streams

Upload = Callable[[Sequence[npt.NDArray[Any]]], list[Tensor]]
"""Staging.upload."""

_BUFFERS = 16
"""A step sends a handful of times, and two are on their way at most: the oldest buffer is free before it is needed."""

_ALIGNMENT = 16
_LEAST_BYTES = 4096


class Staging:
    """Owns the buffers of one device. For one thread at a time, but for Download.tensor."""

    def __init__(self, streams: Streams, buffers: int = _BUFFERS) -> None:
        self.streams = streams
        self._up = deque(_Buffer() for _ in range(buffers)) if streams.ahead else deque()
        self._down: list[Tensor] = []  # free

    def upload(self, arrays: Sequence[npt.NDArray[Any]]) -> list[Tensor]:
        """All in one transfer → a tensor of the device for each, of its shape and dtype, for what is computed from now
        on.

        On a CPU they share the arrays' memory, so those are given away. Elsewhere they may be written again at once.
        """
        sources = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
        if not self.streams.ahead:
            return sources
        begins, total = [], 0
        for source in sources:
            begins.append(total)
            total += -(-source.nbytes // _ALIGNMENT) * _ALIGNMENT
        host = self._next(total)
        for source, begin in zip(sources, begins, strict=True):
            _part(host, begin, source).copy_(source)
        device, self._up[-1].free = self.streams.upload(host)
        return [_part(device, begin, source) for source, begin in zip(sources, begins, strict=True)]

    def download(self, source: Later[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Download:
        """Sends down what was launched to lie in `source`, contiguous and of that shape and dtype."""
        if not self.streams.ahead:
            return Download(source.value, PASSED, [])
        like = torch.empty(tuple(shape), dtype=dtype, device="meta")
        at = next((at for at, buffer in enumerate(self._down) if len(buffer) >= like.nbytes), None)
        buffer = self._down.pop(at) if at is not None else self.streams.host_buffer(_rounded(like.nbytes))
        host = _part(buffer, 0, like)
        return Download(host, self.streams.download(source, host), self._down, buffer)

    def _next(self, size_bytes: int) -> Tensor:
        """Of the buffer whose turn it is, that many bytes. It stands last in the rotation then."""
        buffer = self._up.popleft()
        self._up.append(buffer)
        buffer.free.wait()
        if buffer.host is None or len(buffer.host) < size_bytes:
            buffer.host = self.streams.host_buffer(_rounded(size_bytes))
        return buffer.host[:size_bytes]


class Download:
    """An array on its way to the host."""

    def __init__(self, host: Tensor, there: Event, free: list[Tensor], buffer: Tensor | None = None) -> None:
        """buffer: goes back to `free` when it was read."""
        self._host = host
        self._there = there
        self._free = free
        self._buffer = buffer

    def tensor(self) -> Tensor:
        """Waits for it → on the host. Once."""
        self._there.wait()
        if self._buffer is None:
            return self._host
        tensor = self._host.clone()
        self._free.append(self._buffer)
        self._buffer = None
        return tensor


class _Buffer:
    def __init__(self) -> None:
        self.host: Tensor | None = None
        self.free: Event = PASSED


def _part(buffer: Tensor, begin: int, like: Tensor) -> Tensor:
    """Of a buffer of bytes the part from `begin` on, as a tensor like another one."""
    return buffer[begin : begin + like.nbytes].view(like.dtype).view(like.shape)


def _rounded(size_bytes: int) -> int:
    """To a power of two, so that a buffer seldom has to grow."""
    return max(1 << max(size_bytes - 1, 0).bit_length(), _LEAST_BYTES)
