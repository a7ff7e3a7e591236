"""The attention backends by the name that a test is parametrised with: those of a CPU, or, in a process where Triton's
interpreter is on (tests/unit/kernels/interpreted/), that of a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from minisgl_backend.attention.interface import AttentionBackend, AttentionVariant, StepRows
from minisgl_backend.attention.native_backend import NativeAttention
from minisgl_backend.attention.torch_backend import TorchAttention
from minisgl_backend.kernels.native.build import CompilerMissing, build
from minisgl_backend.kernels.native.levels import levels_here
from minisgl_backend.kernels.native.library import Library, load_library, open_library
from minisgl_backend.kvpool.paged import PagedKvPool
from minisgl_backend.models.locate import cache_folder

if TYPE_CHECKING:
    from minisgl_backend.attention.gpu_backend import GpuAttention

Backend = Callable[[PagedKvPool, Sequence[AttentionVariant]], AttentionBackend]

BACKENDS = ("triton",) if os.environ.get("TRITON_INTERPRET") == "1" else ("torch", "native")


def backend_of(name: str) -> Backend:
    """Of one of BACKENDS. Skips where there is no native library."""
    if name == "torch":
        return TorchAttention
    if name == "triton":
        return _TritonAttention
    library = native_library()
    return lambda pool, variants: NativeAttention(pool, variants, library)


def triton_attention(pool: PagedKvPool, variants: Sequence[AttentionVariant], heads: int) -> GpuAttention:
    """On a CPU its kernels run in Triton's interpreter, or not at all."""
    from minisgl_backend.attention.gpu_backend import GpuAttention  # they import Triton
    from minisgl_backend.attention.triton_phases import TritonChunks, TritonDecode

    return GpuAttention(
        pool,
        variants,
        chunks=TritonChunks(pool, variants, heads),
        decode=TritonDecode(pool, variants),
        upload=lambda arrays: [torch.from_numpy(array).to(pool.layer(0)[0].device) for array in arrays],
    )


@dataclass(frozen=True)
class _TritonAttention:
    """Learns how many heads there are when it is asked to attend."""

    pool: PagedKvPool
    variants: Sequence[AttentionVariant]
    rows: StepRows | None = None

    def begin(self, rows: StepRows) -> _TritonAttention:
        return replace(self, rows=rows)

    def attend(self, layer: int, q: Tensor, *others: Any) -> Tensor:
        assert self.rows is not None
        return triton_attention(self.pool, self.variants, q.shape[1]).begin(self.rows).attend(layer, q, *others)


def native_levels() -> tuple[str, ...]:
    """Sets of instructions that this machine has, best first."""
    return tuple(level.name for level in levels_here())


def native_library(level: str = "") -> Library:
    """Of a level; of the best one, or that in MINISGL_CPU_LEVEL, where none is named. Built if it is not there: half a
    minute, once.
    """
    try:
        for one in levels_here():
            if one.name == level:
                return load_library(one, build(one, cache_folder()))
        library = open_library(cache_folder())
    except CompilerMissing:
        library = None
    if library is None:
        pytest.skip("no compiler here, or a processor that our kernels do not know")
    return library


def printed_by(script: str) -> str:
    """What a process of its own prints that runs the script beside the native library, which is built before it."""
    native_library()  # or the test is skipped
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
