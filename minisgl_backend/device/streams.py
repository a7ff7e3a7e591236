"""Queues of work on a device, as the worker needs them: copies there, computing, copies back.

    host ── up ──►  device: compute  ── down ──►  host

Each queue works in order and beside the others, and the host goes on meanwhile. What waits for what is told in the
verbs: what is computed sees everything that was sent up before it was launched; a copy back sees everything that was
launched before it. A CPU has no queues: whatever it is given is done when the call returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from torch import Tensor

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Event(Protocol):
    """A place in a queue."""

    def wait(self) -> None:
        """Returns when the queue has come so far; raises what went wrong on the way. From any thread."""
        ...


class Later(Protocol[T_co]):
    """What a piece of work returned."""

    @property
    def value(self) -> T_co:
        """Its tensors may still be on their way, for all but the queue of the work itself."""
        ...


class Streams(Protocol):
    """The queues of one device. For one thread at a time."""

    @property
    def ahead(self) -> bool:
        """Whether the device works on while the host does something else. Where not, `compute` is all there is."""
        ...

    def compute(self, work: Callable[[], T]) -> Later[T]:
        """Launches `work`, behind what was launched before and what was sent up. It must not wait for the device."""
        ...

    def mark(self) -> Event:
        """When all that was launched so far is done."""
        ...

    def host_buffer(self, size_bytes: int) -> Tensor:
        """[size_bytes] uint8 on the host, which the device copies from and to by itself."""
        ...

    def upload(self, host: Tensor) -> tuple[Tensor, Event]:
        """Sends (a part of) a host buffer up → it on the device, and when `host` may be written again."""
        ...

    def download(self, source: Later[Tensor], host: Tensor) -> Event:
        """Sends what lies in `source` to (a part of) a host buffer of its size and dtype; from then on it is there."""
        ...


class Done(Generic[T]):
    """A Later that was computed, or launched, at once."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value


class _Passed:
    def wait(self) -> None:
        """See Event."""


PASSED: Event = _Passed()
"""An event that has been."""


class HostStreams:
    """See Streams: a CPU, which is no device beside the host. Nobody asks it for copies (staging.py)."""

    ahead = False

    def compute(self, work: Callable[[], T]) -> Later[T]:
        """See Streams."""
        return Done(work())

    def mark(self) -> Event:
        """See Streams."""
        return PASSED

    def host_buffer(self, size_bytes: int) -> Tensor:
        """See Streams."""
        raise AssertionError("a CPU copies nothing")

    def upload(self, host: Tensor) -> tuple[Tensor, Event]:
        """See Streams."""
        raise AssertionError("a CPU copies nothing")

    def download(self, source: Later[Tensor], host: Tensor) -> Event:
        """See Streams."""
        raise AssertionError("a CPU copies nothing")
