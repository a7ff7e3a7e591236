"""The tensors behind the pages: keys and values of every layer, in pages that the scheduler hands out by number.

One more page than the scheduler knows of is held here, the scratch page: warm-up steps write there.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl_backend.kvpool.sizing import bytes_per_page


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one token leaves in the pool."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def bytes_per_page(self, page_size: int) -> int:
        """Keys and values of `page_size` tokens in all layers."""
        return bytes_per_page(self.num_layers, self.num_kv_heads, self.head_dim, self.dtype.itemsize, page_size)


class PagedKvPool:
    """Owns k and v, each [num_layers, num_pages + 1, page_size, num_kv_heads, head_dim], zeroed.

    On a CPU the memory is only taken from the system as pages are first written.
    """

    def __init__(self, shape: KvShape, num_pages: int, page_size: int, device: torch.device) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.scratch_page = num_pages
        dims = (shape.num_layers, num_pages + 1, page_size, shape.num_kv_heads, shape.head_dim)
        self._k = _zeros(dims, shape.dtype, device)
        self._v = _zeros(dims, shape.dtype, device)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Views of one layer's keys and values, each [num_pages + 1, page_size, num_kv_heads, head_dim]."""
        return self._k[index], self._v[index]

    def clear(self, pages: Tensor) -> None:
        """Zeros in all layers of `pages`, int64 on the device.

        A hidden place has weight 0 in attention, and 0 · NaN is NaN: what one sequence has left in a page would spoil
        the next one that holds it, for as long as it has not filled it.
        """
        self._k.index_fill_(1, pages, 0.0)
        self._v.index_fill_(1, pages, 0.0)


def _zeros(dims: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU over an anonymous map, since torch.zeros would touch every byte at once."""
    if device.type != "cpu":
        return torch.zeros(dims, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(dims) * dtype.itemsize)  # kept alive by the tensor
    return torch.frombuffer(memory, dtype=dtype).view(dims)
