"""What layers ask of kernels beside their products: one set of functions for each kind of device.

`torch_kernels.py` holds the reference, which runs everywhere; `native/kernels.py` those of our own for a CPU,
`gpu/kernels.py` those for a GPU. Chosen once per engine and passed to the layers when a model is built. All outputs are
new tensors, unless it says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from minisgl_backend.kernels.activation import GatedActivation
from minisgl_backend.kernels.moe import ExpertActivation, ExpertWeights, Routing


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotary angles of the tokens of one step."""

    cos: Tensor  # [tokens, 1, rotary_dim / 2] fp32, times the attention factor
    sin: Tensor
    interleaved: bool = False  # see apply_rotary


@dataclass(frozen=True, slots=True)
class HeadPreparation:
    """What becomes of queries and keys before they meet: RMS norms of each head, then rotation."""

    kernels: Kernels
    rotation: Rotation | None  # None: none
    q_norm: Tensor | None = (
        None  # [head_dim], in the model's dtype or in fp32 (see `rms_norm`); both are there, or none
    )
    k_norm: Tensor | None = None
    eps: float = 0.0  # of the norms

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [tokens, heads, head_dim], k [tokens, kv_heads, head_dim] → the same shapes. May be the ones given."""
        return self.kernels.prepare_heads(q, k, self)


class Int8Product(Protocol):
    """x · (values · scales) + bias, with weights in int8."""

    def __call__(self, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """x [tokens, in], values int8 [out, in], scales fp32 [out, 1], bias [out] of x's dtype → [tokens, out], new."""
        ...


class Kernels(Protocol):
    """See the module. Vectors may have gaps between them, not in them."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See kernels/norm.py. x [tokens, size] or [tokens, heads, size]."""
        ...

    def add_rms_norm(self, x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x, added [tokens, size] without gaps → x + added, rms_norm(x + added)."""
        ...

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x, y of one shape, without gaps → x + y."""
        ...

    def gated(self, activation: str) -> GatedActivation:
        """By the field `activation` of a ModelSpec."""
        ...

    def prepare_heads(self, q: Tensor, k: Tensor, preparation: HeadPreparation) -> tuple[Tensor, Tensor]:
        """See HeadPreparation."""
        ...

    def take_rows(self, table: Tensor, index: Tensor, factor: float = 1.0) -> Tensor:
        """table [rows, size], index [n] int32 or int64 → [n, size]: table[index] · factor.

        Raises IndexError; on a GPU, where nobody waits for that, a row that is not there may come out as NaN instead.
        """
        ...

    def take_own_rows(self, table: Tensor, index: Tensor, first: int, rows: int, factor: float = 1.0) -> Tensor:
        """As take_rows, of a larger table whose rows `first` … `first` + `rows` - 1 begin `table`: zeros for others."""
        ...

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """tanh(x / cap) · cap. x without gaps."""
        ...

    @property
    def int8_product(self) -> Int8Product | None:
        """None: there is none, and layers unpack some rows at a time (layers/quant/stored.py)."""
        ...

    def router_logits(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See kernels/moe.py."""
        ...

    def choose_experts(self, logits: Tensor, top_k: int, *, renormalise: bool) -> Routing:
        """See kernels/moe.py."""
        ...

    def mix_experts(self, x: Tensor, routing: Routing, experts: ExpertWeights, activation: ExpertActivation) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden] of x's dtype, new: the sums of weight · expert(x), in fp32."""
        ...
