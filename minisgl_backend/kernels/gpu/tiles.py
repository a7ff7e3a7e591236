"""How much of a tensor one program takes, where every element is touched once: pure functions of shapes. And how exact
products are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

_FEW_ELEMENTS = 1 << 18  # up to here small programs: as many as possible run side by side
_THREAD_ELEMENTS = 16  # of a warp's thread: one or two loads of 16 bytes in 16 bits


@dataclass(frozen=True, slots=True)
class RowTile:
    """rows × columns of a program, both powers of two, and its warps of 32 threads."""

    rows: int
    columns: int
    warps: int


def row_tile(rows: int, size: int) -> RowTile:
    """For `rows` vectors of `size` numbers that are taken whole. Raises ValueError: they do not fit into registers."""
    columns = triton.next_power_of_2(size)
    if columns > 1 << 16:
        raise ValueError(f"vectors have {size:,} numbers, and kernels of a GPU take at most {1 << 16:,}")
    wanted = 256 if rows * columns <= _FEW_ELEMENTS else 2048
    height = max(wanted // columns, 1)
    return RowTile(height, columns, min(max(height * columns // (32 * _THREAD_ELEMENTS), 1), 16))


def cut_tile(rows: int, size: int) -> RowTile:
    """For `rows` vectors of `size` numbers that need nothing of one another: a row may be cut into several tiles."""
    wanted = 256 if rows * size <= _FEW_ELEMENTS else 2048
    columns = min(triton.next_power_of_2(size), wanted)
    return RowTile(wanted // columns, columns, 1 if wanted == 256 else 4)


def precision_of(x: Tensor) -> str:
    """`input_precision` of the products of a kernel: those of fp32 are rounded to nothing less."""
    return "ieee" if x.dtype == torch.float32 else "tf32"
