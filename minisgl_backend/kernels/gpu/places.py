"""Where the keys and values of a step's tokens go in the pool, in Triton: one launch a step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS = 256


def find_places(rows: Tensor, positions: Tensor, page_tables: Tensor, page_size: int) -> Tensor:
    """rows, positions [tokens] int32 or int64: whose each token is, and at which position; page_tables [rows, n] int64,
    no gaps in a row → int64 [tokens]: page · page_size + offset.
    """
    places = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    if len(rows):
        _find[(triton.cdiv(len(rows), _TOKENS),)](
            rows, positions, page_tables, places, len(rows), page_tables.stride(0), PAGE_SIZE=page_size, TOKENS=_TOKENS
        )
    return places


@triton.jit(do_not_specialize=["tokens", "table_stride"])
def _find(rows, positions, tables, places, tokens, table_stride, PAGE_SIZE: tl.constexpr, TOKENS: tl.constexpr):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    there = token < tokens
    row = tl.load(rows + token, there, 0).to(tl.int64)
    position = tl.load(positions + token, there, 0)
    page = tl.load(tables + row * table_stride + position // PAGE_SIZE, there, 0).to(tl.int64)
    tl.store(places + token, page * PAGE_SIZE + position % PAGE_SIZE, there)
