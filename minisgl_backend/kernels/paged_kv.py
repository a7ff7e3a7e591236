"""Writing and reading the pages of one layer: the torch references."""

from __future__ import annotations

from torch import Tensor


def write_kv(k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor, places: Tensor) -> None:
    """Stores token t's key and value at places[t]. Mutates the pages.

    k_pages, v_pages [pages, page_size, kv_heads, head_dim], contiguous; k, v [tokens, kv_heads, head_dim];
    places [tokens] int64: page · page_size + offset, each at most once (but for a scratch page).

    What is not finite is stored as 0: a masked place has weight 0 in attention, and 0 · NaN would carry the fault of
    one sequence to whoever gets its page next. The faulty sequence itself is seen by its logits.
    """
    k_pages.flatten(0, 1).index_copy_(0, places, k.nan_to_num(0.0, 0.0, 0.0))
    v_pages.flatten(0, 1).index_copy_(0, places, v.nan_to_num(0.0, 0.0, 0.0))


def gather_pages(pages: Tensor, tables: Tensor) -> Tensor:
    """Copies the pages of `tables` side by side.

    pages [pages, page_size, kv_heads, head_dim], tables [rows, n] int64 → [rows, n · page_size, kv_heads, head_dim].
    """
    rows, count = tables.shape
    _, page_size, kv_heads, head_dim = pages.shape
    return pages.index_select(0, tables.flatten()).view(rows, count * page_size, kv_heads, head_dim)
