"""The tensors of a source on their way to a device: converted or quantised one by one, stacked where one product takes
several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl_backend.config import Quantization
from minisgl_backend.kernels.interface import Kernels
from minisgl_backend.kernels.native.packed import PACKED_DTYPES, pack, packed_shape
from minisgl_backend.kernels.torch_kernels import TORCH_KERNELS
from minisgl_backend.layers.embedding import Embedding, EmbeddingOp
from minisgl_backend.layers.linear import Linear, LinearOp, NativeLinear, PackedProduct
from minisgl_backend.layers.quant.int4 import Int4Rows
from minisgl_backend.layers.quant.int8 import Int8Linear, Int8Rows
from minisgl_backend.layers.quant.stored import DenseRows, StoredEmbedding, StoredLinear, StoredRows
from minisgl_backend.models.checkpoint import TensorSource
from minisgl_backend.models.gguf_tensors import GgufTensors
from minisgl_backend.models.packed_file import PackedStore

_QUANTISE: Mapping[str, Callable[[Tensor], StoredRows]] = {"int8": Int8Rows.quantise, "int4": Int4Rows.quantise}


@dataclass(frozen=True, slots=True)
class NativeProducts:
    """Dense products by our own kernels, for the CPU."""

    product: PackedProduct
    store: PackedStore  # where packed weights lie
    source: TensorSource  # what is packed is read from here. What it has mapped goes when it does, at the load's end


class Weights:
    """Reads for one device and dtype. Names are without `.weight` and `.bias`.

    A single tensor that has the wanted dtype on the CPU stays a view of its file; any other is converted alone, so at
    most one tensor of the source exists twice.

    quantization: the setting. What is quantised are the products of the layers. Embedding and head stay in the model's
    dtype under int8 and int4, as do norms, routers and biases; under gguf they stay as they lie in the file too.

    kernels: of the layers. native: makes the products that are not quantised, if the dtype is one of theirs; routers
    stay as they are.
    """

    def __init__(
        self,
        source: TensorSource,
        device: torch.device,
        dtype: torch.dtype,
        quantization: Quantization = "none",
        kernels: Kernels = TORCH_KERNELS,
        native: NativeProducts | None = None,
    ) -> None:
        assert native is None or device.type == "cpu", "native products are made for the CPU"
        self._source = source
        self._native = native if dtype in PACKED_DTYPES else None
        self.kernels = kernels
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
            return self._dense([f"{name}.weight" for name in names], added)
        product, in_int8 = self.kernels.int8_product, [part for part in parts if isinstance(part, Int8Rows)]
        if product is not None and len(in_int8) == len(parts):
            return Int8Linear.joined(product, in_int8, added)
        return StoredLinear(
            [part or DenseRows(self.tensor(f"{name}.weight")) for part, name in zip(parts, names, strict=True)], added
        )

    def plain_linear(self, names: Sequence[str], *, bias: bool) -> Linear:
        """`linear`, never quantised: routers."""
        weight = self._stacked([f"{name}.weight" for name in names])
        return Linear(weight, self._stacked([f"{name}.bias" for name in names]) if bias else None)

    def embedding(self, name: str, scale: float, *, tied: bool) -> tuple[EmbeddingOp, LinearOp | None]:
        """The lookup in a table and, of a model that ties them, the product with it, which is the head."""
        table = self._packed(f"{name}.weight")
        if table is not None:
            return StoredEmbedding(table, self.dtype, scale), StoredLinear([table]) if tied else None
        weight = self.tensor(f"{name}.weight")
        if not tied:
            return Embedding(weight, scale, self.kernels), None
        head = Linear(weight) if self._native is None else self._dense([f"{name}.weight"], None)
        return Embedding(weight, scale, self.kernels), head

    def head(self, name: str) -> LinearOp:
        """The product that makes logits, of a model that does not tie it."""
        table = self._packed(f"{name}.weight")
        return self._dense([f"{name}.weight"], None) if table is None else StoredLinear([table])

    def _dense(self, names: Sequence[str], bias: Tensor | None) -> LinearOp:
        """A product that is not quantised, with one weight or several on top of one another."""
        native = self._native
        if native is None:
            return Linear(self._stacked(names), bias)
        shapes = [native.source.shapes()[name] for name in names]
        outputs, depth = sum(shape[0] for shape in shapes), shapes[0][1]
        packed = native.store.take(
            "|".join(names),
            packed_shape(outputs, depth, self.dtype),
            self.dtype,
            lambda into: pack(_stacked(native.source, names), into),
        )
        return NativeLinear(native.product, packed, outputs, bias)

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


def _stacked(source: TensorSource, names: Sequence[str]) -> Tensor:
    """In the source's dtype, on the host."""
    return source.read(names[0]) if len(names) == 1 else torch.cat([source.read(name) for name in names])
