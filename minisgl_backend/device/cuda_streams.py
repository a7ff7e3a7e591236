"""The queues of an NVIDIA GPU (streams.py): computing on the stream that is current, copies on one stream each way.

So a copy of the next step's inputs goes up while this step computes, and the tokens of the last one come down while
this one computes. Events are the only order between them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from minisgl_backend.device.streams import Done, Event, Later

T = TypeVar("T")


class CudaStreams:
    """See Streams. Threads that take turns may use it: it makes its GPU current."""

    ahead = True

    def __init__(self, index: int) -> None:
        self._index = index
        self._device = torch.device("cuda", index)
        self._up = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
        self._down = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]

    def compute(self, work: Callable[[], T]) -> Later[T]:
        """See Streams."""
        with torch.cuda.device(self._index):
            return Done(work())

    def mark(self) -> Event:
        """See Streams."""
        return _Recorded(torch.cuda.current_stream(self._index))

    def host_buffer(self, size_bytes: int) -> Tensor:
        """See Streams. Whoever writes it may be in inference mode or not."""
        with torch.inference_mode(False):
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, host: Tensor) -> tuple[Tensor, Event]:
        """See Streams. The copy's memory is that of its own stream; the allocator hears who else reads it."""
        compute = torch.cuda.current_stream(self._index)
        with torch.cuda.stream(self._up):
            device = torch.empty_like(host, device=self._device)
            device.copy_(host, non_blocking=True)
        copied = _Recorded(self._up)
        compute.wait_event(copied.event)
        device.record_stream(compute)
        return device, copied

    def download(self, source: Later[Tensor], host: Tensor) -> Event:
        """See Streams."""
        self._down.wait_stream(torch.cuda.current_stream(self._index))
        with torch.cuda.stream(self._down):
            host.copy_(source.value, non_blocking=True)
        source.value.record_stream(self._down)
        return _Recorded(self._down)


class _Recorded:
    """See Event."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def wait(self) -> None:
        """Spins without the GIL: sleeping until an interrupt costs more than a small step takes."""
        self.event.synchronize()
