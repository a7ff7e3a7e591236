"""Waiting for what a device still reads of memory that the host wants to write again."""

from __future__ import annotations

from typing import Protocol

import torch


class Fence(Protocol):
    """One for each piece of host memory. Used by one thread."""

    def mark(self) -> None:
        """All that reads the memory has been submitted to the current stream."""
        ...

    def wait(self) -> None:
        """Returns when the device has come past the last mark. Before the first one: at once."""
        ...


def make_fence(device: torch.device) -> Fence:
    """For memory of the host that `device` reads."""
    return CudaFence(device) if device.type == "cuda" else NoFence()


class CudaFence:
    """See Fence: an event of the GPU's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        self._event.synchronize()


class NoFence:
    """A CPU has read what it was given when a call returns."""

    def mark(self) -> None:
        pass

    def wait(self) -> None:
        pass
