"""Weights that are kept in fewer bits than they are multiplied in, and the reference product with them.

The product takes some rows at a time back to the dtype of its input: it needs one block of them beside the stored
form, never the whole matrix. It is the reference for fast kernels, not one: reading and unpacking cost more than the
product itself at decode. One file of this room says for each method what is stored and how it comes back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK_VALUES = 1 << 20  # of weights that exist in full at a time: 4 MiB in fp32


class StoredRows(Protocol):
    """One matrix [rows, columns], however it is kept."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def dense(self, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """Some rows, in order: a slice without a step, or ids [n] of an integer dtype → [n, columns], a new tensor."""
        ...


def row_blocks(shape: Sequence[int]) -> Iterator[slice]:
    """All rows of a matrix, some at a time: what is done with them needs little memory, and finds it in the cache."""
    rows, columns = shape
    step = max(_BLOCK_VALUES // columns, 1)
    return (slice(begin, min(begin + step, rows)) for begin in range(0, rows, step))


@dataclass(frozen=True, slots=True)
class DenseRows:
    """See StoredRows: the plain one, beside others in one product. weight [rows, columns]."""

    weight: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.weight.shape
        return rows, columns

    def dense(self, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        return self.weight[rows].to(dtype)


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """See LinearOp. The products of `parts`, side by side in their order, and bias [rows of all parts]."""

    parts: Sequence[StoredRows]
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty((x.shape[0], sum(part.shape[0] for part in self.parts)))
        at = 0
        for part in self.parts:
            for rows in row_blocks(part.shape):
                out[:, at + rows.start : at + rows.stop] = F.linear(x, part.dense(rows, x.dtype))
            at += part.shape[0]
        return out if self.bias is None else out.add_(self.bias)


@dataclass(frozen=True, slots=True)
class StoredEmbedding:
    """See EmbeddingOp. Only the rows of a step's tokens are unpacked."""

    table: StoredRows
    dtype: torch.dtype
    scale: float = 1.0

    def __call__(self, tokens: Tensor) -> Tensor:
        vectors = self.table.dense(tokens, self.dtype)
        return vectors if self.scale == 1.0 else vectors.mul_(self.scale)
