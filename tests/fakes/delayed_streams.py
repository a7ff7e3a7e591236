"""A device on the CPU that is as late as it may be: nothing is done before somebody waits for it.

See Streams. What was launched or sent lies in its queue until an event behind it is waited for, or what it returned is
asked for; then the queue works that far and no further, and the queues it waits for do the same. A buffer that is
written too early, a copy that is read before it was made: either shows as wrong numbers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from minisgl_backend.device.streams import Event, Later

T = TypeVar("T")

POISON = 0x6B


class DelayedStreams:
    """`waits`: how often the host waited for what was not done, by queue. Several threads may wait at a time."""

    ahead = True

    def __init__(self) -> None:
        lock = threading.RLock()
        self._compute, self._up, self._down = (_Queue(name, lock) for name in ("compute", "up", "down"))
        self.buffers: list[Tensor] = []

    @property
    def waits(self) -> dict[str, int]:
        return {queue.name: queue.waits for queue in (self._compute, self._up, self._down)}

    @property
    def pending(self) -> int:
        """Pieces of work that were launched and not done."""
        return len(self._compute.work)

    def compute(self, work: Callable[[], T]) -> Later[T]:
        later = _Later(self._compute, work)
        later.event = self._compute.put(later.run)
        return later

    def mark(self) -> Event:
        return self._compute.put(lambda: None)

    def host_buffer(self, size_bytes: int) -> Tensor:
        self.buffers.append(torch.full((size_bytes,), POISON, dtype=torch.uint8))
        return self.buffers[-1]

    def upload(self, host: Tensor) -> tuple[Tensor, Event]:
        assert any(_within(host, buffer) for buffer in self.buffers), "a device copies from its own buffers only"
        device = torch.full_like(host, POISON)
        copied = self._up.put(lambda: _copy(device, host))
        if self._compute.busy:  # the work that is being done sends for itself: on a device it is launched in pieces
            copied.reach()
        else:
            self._compute.put(copied.reach)
        return device, copied

    def download(self, source: Later[Tensor], host: Tensor) -> Event:
        assert any(_within(host, buffer) for buffer in self.buffers), "a device copies to its own buffers only"
        computed = self._compute.put(lambda: None)
        self._down.put(computed.reach)

        def copy() -> None:
            assert source.value.shape == host.shape and source.value.dtype == host.dtype
            assert source.value.is_contiguous()
            _copy(host, source.value)

        return self._down.put(copy)


class _Queue:
    def __init__(self, name: str, lock: threading.RLock) -> None:
        """lock: held while something is done, in this queue or another one."""
        self.name = name
        self._lock = lock
        self.work: deque[Callable[[], None]] = deque()
        self.launched = 0
        self.done = 0
        self.waits = 0
        self.busy = False

    def put(self, work: Callable[[], None]) -> _Place:
        self.work.append(work)
        self.launched += 1
        return _Place(self, self.launched)

    @torch.inference_mode()
    def reach(self, place: int) -> None:
        with self._lock:
            while self.done < place:
                assert not self.busy, f"work in the queue {self.name} waits for what stands behind it"
                self.busy = True
                try:
                    self.work[0]()
                finally:
                    self.busy = False
                self.work.popleft()
                self.done += 1


class _Place:
    """See Event."""

    def __init__(self, queue: _Queue, place: int) -> None:
        self._queue = queue
        self._place = place

    def wait(self) -> None:
        """The host waits."""
        self._queue.waits += self._queue.done < self._place
        self.reach()

    def reach(self) -> None:
        """A queue waits."""
        self._queue.reach(self._place)


class _Later(Generic[T]):
    """See Later. Asking for what was launched waits for it: as a device does when the host reads a tensor."""

    event: _Place

    def __init__(self, queue: _Queue, work: Callable[[], T]) -> None:
        self._queue = queue
        self._work = work
        self._value: list[T] = []

    def run(self) -> None:
        self._value.append(self._work())

    @property
    def value(self) -> T:
        self.event.reach()
        return self._value[0]


def _copy(to: Tensor, source: Tensor) -> None:
    to.copy_(source)


def _within(part: Tensor, whole: Tensor) -> bool:
    begin = part.data_ptr() - whole.data_ptr()
    return begin >= 0 and begin + part.nbytes <= whole.nbytes
