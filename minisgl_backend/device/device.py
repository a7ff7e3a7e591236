"""What the rooms above need of a device, and the choice of one from the settings.

Beside `kernels/` this room is the only one that may say `torch.cuda`. A worker opens one device at start-up and hands
it down; nobody asks torch for a "current" device.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

import torch

from minisgl_backend.device.cpu import CpuDevice
from minisgl_backend.device.cuda import CudaDevice, cuda_present
from minisgl_backend.device.graph import Recorder
from minisgl_backend.device.streams import Streams
from minisgl_backend.errors import ConfigError

DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""The setting `dtype` → torch's dtype; "auto" is resolved by `resolve_dtype`."""


class Device(Protocol):
    """One device of one rank. All sizes are bytes."""

    @property
    def name(self) -> str:
        """For the operator: "cpu (AVX2, 2 threads)", "cuda:0 (NVIDIA H200)"."""
        ...

    @property
    def capability(self) -> tuple[int, int]:
        """Of a GPU, CUDA's compute capability: (9, 0) for an H200. (0, 0): it is none."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """Where tensors of this rank live."""
        ...

    def free_memory_bytes(self) -> int:
        """What this process could still take at this moment."""
        ...

    def total_memory_bytes(self) -> int:
        """All memory of the device (of the container, where one limits it)."""
        ...

    def synchronize(self) -> None:
        """Returns when all work submitted so far is done; raises what went wrong in it."""
        ...

    @property
    def streams(self) -> Streams:
        """Its queues; always the same ones."""
        ...

    def recorder(self) -> Recorder | None:
        """A new one, for the steps of one runner. None: the device itself records nothing."""
        ...

    def automatic_dtype(self, checkpoint: torch.dtype) -> torch.dtype:
        """The dtype to compute in when the setting says "auto"."""
        ...

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raises ConfigError when the device can not compute in `dtype`."""
        ...

    def peak_memory_bytes(self, work: Callable[[], None]) -> int:
        """Runs `work` and returns what it took at its peak beyond what was held before.

        Where nobody meters memory (the CPU) `work` is not run and the answer is 0.
        """
        ...

    def reserve_memory(self, size_bytes: int) -> None:
        """Takes so much for later use by this process, so that nobody beside it does. A CPU takes nothing."""
        ...

    def kv_pool_bytes(self, *, utilization: float, peak_bytes: int, useful_bytes: int) -> int:
        """How large the KV pool may be once the weights are loaded.

        utilization: the setting gpu_memory_utilization. peak_bytes: activations of the largest step,
        and what recordings hold.
        useful_bytes: the pool that holds every slot at the context limit: more is never used without a cache.
        """
        ...


def open_device(setting: str, threads: int = 0) -> Device:
    """The setting `device` → a device: "auto" (CUDA when there is one, else the CPU), "cpu", "cuda", "cuda:N".

    threads: of torch's CPU kernels in this process, 0: by the machine (placement.py). Raises ConfigError for an unknown
    word or a CUDA device that is not there.
    """
    if setting == "auto":
        setting = "cuda" if cuda_present() else "cpu"
    if setting == "cpu":
        return CpuDevice(threads)
    match = re.fullmatch(r"cuda(?::(\d+))?", setting)
    if match is None:
        raise ConfigError(f"setting 'device' must be 'auto', 'cpu', 'cuda', 'cuda:N' or 'fake', got {setting!r}")
    return CudaDevice(int(match.group(1) or 0), threads)


def resolve_dtype(device: Device, setting: str, checkpoint: torch.dtype) -> torch.dtype:
    """The setting `dtype` and the checkpoint's dtype → the dtype of weights, activations and KV.

    Raises ConfigError for a dtype the device can not compute in.
    """
    if setting == "auto":
        return device.automatic_dtype(checkpoint)
    dtype = DTYPES[setting]
    device.check_dtype(dtype)
    return dtype
