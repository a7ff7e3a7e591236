"""How many pages the pool gets: the setting `kv_bytes`, or what the device can spare. Pure."""

from __future__ import annotations

from minisgl_backend.errors import ConfigError


def bytes_per_page(num_layers: int, num_kv_heads: int, head_dim: int, item_bytes: int, page_size: int) -> int:
    """Keys and values of `page_size` tokens in all layers."""
    return 2 * num_layers * page_size * num_kv_heads * head_dim * item_bytes


def pages_in(budget_bytes: int, bytes_per_page: int, *, source: str) -> int:
    """Whole pages in a budget. `source` names where the budget comes from, for the message.

    Raises ConfigError when not even one page fits.
    """
    pages = budget_bytes // bytes_per_page
    if pages < 1:
        raise ConfigError(
            f"the KV pool needs at least one page of {bytes_per_page:,} bytes, but {source} leaves "
            f"{max(budget_bytes, 0):,} bytes; lower 'page_size', raise 'kv_bytes' or free memory"
        )
    return pages


def useful_pages(max_running: int, context_tokens: int, page_size: int) -> int:
    """Pages with which every slot can reach the context limit at the same time."""
    return max_running * -(-context_tokens // page_size)
