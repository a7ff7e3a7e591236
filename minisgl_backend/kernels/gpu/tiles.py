"""How much of a tensor one program takes, where every element is touched once: pure functions of shapes."""

from __future__ import annotations

from dataclasses import dataclass

import triton

_FEW_ELEMENTS = 1 << 18  # up to here small programs: as many as possible run side by side
_THREAD_ELEMENTS = 16  # of a warp's thread: one or two loads of 16 bytes in 16 bits


@dataclass(frozen=True, slots=True)
class RowTile:
    """rows × columns of a program. columns: the whole row, up to the next power of two."""

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


def flat_tile(elements: int) -> tuple[int, int]:
    """For `elements` numbers, whichever row they are of → numbers and warps of a program."""
    return (256, 1) if elements <= _FEW_ELEMENTS else (2048, 4)
