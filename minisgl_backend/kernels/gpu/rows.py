"""Rows of a table on a GPU: embeddings, rotary angles, the tokens that are sampled."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.gpu.tiles import cut_tile


def take_rows_triton(table: Tensor, index: Tensor, factor: float = 1.0) -> Tensor:
    """table [rows, size], rows may have gaps between them; index [n] int32 or int64 → [n, size]: table[index] · factor.

    A row that is not there comes out as NaN: nobody waits here for the device to say so.
    """
    count, (rows, size) = len(index), table.shape
    assert table.stride(1) == 1 or size == 1, "numbers of a row lie side by side"
    assert index.is_contiguous(), "the index lies without gaps"
    out = torch.empty((count, size), dtype=table.dtype, device=table.device)
    if out.numel():
        tile = cut_tile(count, size)
        _take_rows[(triton.cdiv(count, tile.rows), triton.cdiv(size, tile.columns))](
            table, index, out, count, rows, size, table.stride(0), factor,
            SCALED=factor != 1.0, ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.warps,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["count", "rows"], do_not_specialize_on_alignment=["index"])
def _take_rows(
    table, index, out, count, rows, size, table_stride, factor,
    SCALED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some of the rows asked for × some columns."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    source = tl.load(index + row, row < count, 0).to(tl.int64)
    there = (source >= 0) & (source < rows)
    inside = (row < count)[:, None] & (column < size)
    value = tl.load(table + source[:, None] * table_stride + column, inside & there[:, None], float("nan"))
    if SCALED:
        value = (value.to(tl.float32) * factor).to(out.dtype.element_ty)
    tl.store(out + row.to(tl.int64)[:, None] * size + column, value, inside)
