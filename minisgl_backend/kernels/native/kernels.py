"""The layers' kernels in C++, for a CPU: see src/pointwise.h. Routing and experts are torch's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from minisgl_backend.kernels.activation import GatedActivation
from minisgl_backend.kernels.interface import HeadPreparation
from minisgl_backend.kernels.native.library import Library
from minisgl_backend.kernels.torch_kernels import TorchExperts


@dataclass(frozen=True, slots=True)
class NativeKernels(TorchExperts):
    """See Kernels. Tensors are on the CPU, in fp32, bf16 or fp16."""

    library: Library
    _activations: Mapping[str, GatedActivation] = field(init=False)

    def __post_init__(self) -> None:
        ops = self.library.ops
        activations = {"silu": ops.silu_mul.default, "gelu_tanh": ops.gelu_tanh_mul.default}
        object.__setattr__(self, "_activations", activations)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out: Tensor = self.library.ops.rms_norm.default(x, weight, eps)
        return out

    def add_rms_norm(self, x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = self.library.ops.add_rms_norm.default(x, added, weight, eps)
        return out

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.library.ops.add.default(x, y)
        return out

    def gated(self, activation: str) -> GatedActivation:
        return self._activations[activation]

    def prepare_heads(self, q: Tensor, k: Tensor, preparation: HeadPreparation) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = self.library.ops.rotate.default(q, k, *_settings(preparation))
        return out

    def take_rows(self, table: Tensor, index: Tensor, factor: float = 1.0) -> Tensor:
        out: Tensor = self.library.ops.take_rows.default(table, index, factor)
        return out

    def take_own_rows(self, table: Tensor, index: Tensor, first: int, rows: int, factor: float = 1.0) -> Tensor:
        out: Tensor = self.library.ops.take_own_rows.default(table, index, first, rows, factor)
        return out

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        out: Tensor = self.library.ops.softcap.default(x, cap)
        return out


def prepare_and_write(
    ops: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    preparation: HeadPreparation,
    pages: tuple[Tensor, Tensor],
    places: Tensor,
) -> Tensor:
    """HeadPreparation and `write_kv` in one launch: keys go from the projection to their places at once → q, prepared.

    ops: of a native library. q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim]. pages: of keys and of
    values; they and places: see write_kv. Mutates the pages.
    """
    out: Tensor = ops.rotate_and_write.default(q, k, v, *_settings(preparation), *pages, places)
    return out


def _settings(
    preparation: HeadPreparation,
) -> tuple[Tensor | None, Tensor | None, bool, Tensor | None, Tensor | None, float]:
    """As the operators take it."""
    rotation = preparation.rotation
    cos, sin, interleaved = (rotation.cos, rotation.sin, rotation.interleaved) if rotation else (None, None, False)
    return cos, sin, interleaved, preparation.q_norm, preparation.k_norm, preparation.eps
