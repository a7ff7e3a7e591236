"""What our code really launches, seen without a GPU: wrappers run over meta tensors, which have shapes and no memory.

`collect` stands in for Triton's launch: it binds the arguments as Triton would on an H200 (types, which are constants,
which are divisible by 16) and keeps that. Whatever reads a value of the device on the way fails on a meta tensor, so
what runs through here can be recorded in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

META = torch.device("meta")

_GRID_LIMITS = (2**31 - 1, 65535, 65535)  # CUDA's


@dataclass(frozen=True, eq=False)
class Launch:
    """One way in which a kernel is compiled."""

    kernel: JITFunction
    signature: dict[str, str]  # parameter → Triton's type, or "constexpr"
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]  # num_warps and the like, as the launch gave them
    origin: str  # where it was seen first

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def named_constants(self) -> dict[str, Any]:
        names = list(self.signature)
        return {names[path[0]]: value for path, value in self.constants.items()}

    @property
    def key(self) -> str:
        """Equal for launches that share their machine code."""
        return repr((self.name, self.signature, self.constants, self.attributes, sorted(self.options.items())))

    def __str__(self) -> str:
        types = sorted({kind for kind in self.signature.values() if kind.startswith("*")})
        constants = ", ".join(f"{name}={value}" for name, value in self.named_constants.items())
        return f"{self.name}[{' '.join(types)}; {constants}; {self.options}] of {self.origin}"


@dataclass
class Collection:
    """Launches in the order in which they first came, each once."""

    launches: dict[str, Launch] = field(default_factory=dict)
    origin: str = ""
    count: int = 0  # launches in all
    faults: list[str] = field(default_factory=list)  # grids that CUDA refuses

    def add(self, kernel: JITFunction, arguments: tuple[Any, ...], grid: Any, given: dict[str, Any]) -> None:
        """Binds as JITFunction.run does (Triton 3.6 to 3.9)."""
        _, _, _, backend, binder = kernel.create_binder()
        bound, specialization, options = binder(*arguments, **given)
        _, signature, constants, attributes = kernel._pack_args(backend, dict(given), bound, specialization, options)
        launch = Launch(kernel, signature, constants, attributes, dict(options), self.origin)
        self.launches.setdefault(launch.key, launch)
        self.count += 1
        sizes = grid(bound) if callable(grid) else grid
        for size, limit in zip(sizes, _GRID_LIMITS, strict=False):
            if not isinstance(size, int) or not 0 < size <= limit:
                self.faults.append(f"grid {sizes} of {launch}")

    def run(self, origin: str, work: Callable[[], Any]) -> None:
        """Collects what work launches."""
        self.origin = origin
        with torch.inference_mode():
            work()


class _H200:
    """What Triton asks of a driver before it launches."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return META


@contextmanager
def collecting() -> Iterator[Collection]:
    """While it lasts no kernel of this process is launched: all are collected."""
    collection = Collection()

    def run(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **given: Any) -> None:
        collection.add(self, arguments, grid, given)

    launch, before = JITFunction.run, driver._active  # None: it was not asked for yet, and there may be none
    driver.set_active(_H200())
    JITFunction.run = run
    try:
        yield collection
    finally:
        JITFunction.run = launch
        driver.set_active(before)
