"""The tensors of a source on their way to a device: converted one by one, stacked where one product takes several."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minisgl_backend.layers.linear import Linear, LinearOp
from minisgl_backend.models.checkpoint import TensorSource


class Weights:
    """Reads for one device and dtype. Names are without `.weight` and `.bias`.

    A single tensor that has the wanted dtype on the CPU stays a view of its file; any other is converted alone, so at
    most one tensor of the source exists twice.
    """

    def __init__(self, source: TensorSource, device: torch.device, dtype: torch.dtype) -> None:
        self._source = source
        self.device = device
        self.dtype = dtype

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor by its whole name, in the model's dtype unless another is given."""
        return self._source.read(name).to(device=self.device, dtype=dtype or self.dtype)

    def linear(self, names: Sequence[str], *, bias: bool) -> LinearOp:
        """The products of `names`, which take the same input, as one: their outputs lie side by side, in this order."""
        weight = self._stacked([f"{name}.weight" for name in names])
        return Linear(weight, self._stacked([f"{name}.bias" for name in names]) if bias else None)

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
