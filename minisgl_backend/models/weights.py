"""The tensors of a source on their way to a device: converted or quantised one by one, stacked where one product takes
several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from minisgl_backend.config import Quantization
from minisgl_backend.layers.embedding import Embedding, EmbeddingOp
from minisgl_backend.layers.linear import Linear, LinearOp
from minisgl_backend.layers.quant.int4 import Int4Rows
from minisgl_backend.layers.quant.int8 import Int8Rows
from minisgl_backend.layers.quant.stored import DenseRows, StoredEmbedding, StoredLinear, StoredRows
from minisgl_backend.models.checkpoint import TensorSource
from minisgl_backend.models.gguf_tensors import GgufTensors

_QUANTISE: Mapping[str, Callable[[Tensor], StoredRows]] = {"int8": Int8Rows.quantise, "int4": Int4Rows.quantise}


class Weights:
    """Reads for one device and dtype. Names are without `.weight` and `.bias`.

    A single tensor that has the wanted dtype on the CPU stays a view of its file; any other is converted alone, so at
    most one tensor of the source exists twice.

    quantization: the setting. What is quantised are the products of the layers. Embedding and head stay in the model's
    dtype under int8 and int4, as do norms, routers and biases; under gguf they stay as they lie in the file too.
    """

    def __init__(
        self, source: TensorSource, device: torch.device, dtype: torch.dtype, quantization: Quantization = "none"
    ) -> None:
        self._source = source
        self.quantization = quantization
        self.device = device
        self.dtype = dtype

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor by its whole name, in the model's dtype unless another is given.

        Where weights are quantised it is a copy: a view of one norm would keep all of its shard in memory.
        """
        copy = self.quantization in _QUANTISE
        return self._source.read(name).to(device=self.device, dtype=dtype or self.dtype, copy=copy)

    def read(self, name: str) -> Tensor:
        """One tensor as its source has it: on the host, in the source's dtype, not to be written to."""
        return self._source.read(name)

    def linear(self, names: Sequence[str], *, bias: bool) -> LinearOp:
        """The products of `names`, which take the same input, as one: their outputs lie side by side, in this order."""
        added = self._stacked([f"{name}.bias" for name in names]) if bias else None
        parts = [self._stored(f"{name}.weight") for name in names]
        if all(part is None for part in parts):
            return self.plain_linear(names, bias=bias)
        return StoredLinear(
            [part or DenseRows(self.tensor(f"{name}.weight")) for part, name in zip(parts, names, strict=True)], added
        )

    def plain_linear(self, names: Sequence[str], *, bias: bool) -> Linear:
        """`linear`, never quantised: routers."""
        weight = self._stacked([f"{name}.weight" for name in names])
        return Linear(weight, self._stacked([f"{name}.bias" for name in names]) if bias else None)

    def embedding(self, name: str, scale: float) -> tuple[EmbeddingOp, LinearOp]:
        """The lookup in a table and the product with it, which is the head of a model that ties them."""
        table = self._packed(f"{name}.weight")
        if table is not None:
            return StoredEmbedding(table, self.dtype, scale), StoredLinear([table])
        weight = self.tensor(f"{name}.weight")
        return Embedding(weight, scale), Linear(weight)

    def head(self, name: str) -> LinearOp:
        """The product that makes logits, of a model that does not tie it."""
        table = self._packed(f"{name}.weight")
        return self.plain_linear([name], bias=False) if table is None else StoredLinear([table])

    def _stored(self, name: str) -> StoredRows | None:
        """A matrix in fewer bits; None: it is taken as it is."""
        quantise = _QUANTISE.get(self.quantization)
        if quantise is None:
            return self._packed(name)
        return quantise(self._source.read(name).to(self.device))

    def _packed(self, name: str) -> StoredRows | None:
        """A matrix as a GGUF file holds it; None: that is not asked for, or it is not quantised there."""
        if self.quantization != "gguf" or not isinstance(self._source, GgufTensors):
            return None
        return self._source.stored(name, self.device)

    def _stacked(self, names: Sequence[str]) -> Tensor:
        if len(names) == 1:
            return self.tensor(names[0])
        shapes = [self._source.shapes()[name] for name in names]
        whole = torch.empty((sum(s[0] for s in shapes), *shapes[0][1:]), dtype=self.dtype, device=self.device)
        row = 0
        for name, shape in zip(names, shapes, strict=True):
            whole[row : row + shape[0]].copy_(self._source.read(name))
            row += shape[0]
        return whole
