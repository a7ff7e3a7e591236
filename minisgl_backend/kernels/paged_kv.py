"""Writing and reading the pages of one layer: the torch references."""

from __future__ import annotations

from torch import Tensor


def write_kv(k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor, places: Tensor) -> None:
    """Stores token t's key and value at places[t]. Mutates the pages.

    k_pages, v_pages [pages, page_size, kv_heads, head_dim], contiguous; k, v [tokens, kv_heads, head_dim];
    places [tokens] int64: page · page_size + offset, each at most once (but for a scratch page).

    What is not finite is stored as it is: whoever attends to it, in whichever step, must come to logits that show it.
    """
    k_pages.flatten(0, 1).index_copy_(0, places, k)
    v_pages.flatten(0, 1).index_copy_(0, places, v)


def gather_pages(pages: Tensor, tables: Tensor) -> Tensor:
    """Copies the pages of `tables` side by side.

    pages [pages, page_size, kv_heads, head_dim], tables [rows, n] int64 → [rows, n · page_size, kv_heads, head_dim].
    """
    rows, count = tables.shape
    _, page_size, kv_heads, head_dim = pages.shape
    return pages.index_select(0, tables.flatten()).view(rows, count * page_size, kv_heads, head_dim)
