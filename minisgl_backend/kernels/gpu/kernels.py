"""The layers' kernels in Triton, for a GPU. Each is one launch, experts are a few; a graph can hold them all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from minisgl_backend.kernels.activation import GatedActivation
from minisgl_backend.kernels.gpu.activation import gelu_tanh_mul_triton, silu_mul_triton, softcap_triton
from minisgl_backend.kernels.gpu.heads import prepare_heads_triton
from minisgl_backend.kernels.gpu.int8 import int8_product_triton
from minisgl_backend.kernels.gpu.moe import mix_experts_triton
from minisgl_backend.kernels.gpu.norm import add_rms_norm_triton, rms_norm_triton
from minisgl_backend.kernels.gpu.routing import choose_experts_triton, router_logits_triton
from minisgl_backend.kernels.gpu.rows import take_rows_triton
from minisgl_backend.kernels.interface import HeadPreparation, Int8Product
from minisgl_backend.kernels.moe import ExpertActivation, ExpertWeights, Routing
from minisgl_backend.kernels.torch_kernels import take_own_rows

_ACTIVATIONS: Mapping[str, GatedActivation] = {"silu": silu_mul_triton, "gelu_tanh": gelu_tanh_mul_triton}


@dataclass(frozen=True, slots=True)
class TritonKernels:
    """See Kernels. Tensors are on one GPU, in fp32, bf16 or fp16. Nothing here waits for it."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm_triton(x, weight, eps)

    def add_rms_norm(self, x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm_triton(x, added, weight, eps)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y  # one launch in torch too

    def gated(self, activation: str) -> GatedActivation:
        return _ACTIVATIONS[activation]

    def prepare_heads(self, q: Tensor, k: Tensor, preparation: HeadPreparation) -> tuple[Tensor, Tensor]:
        return prepare_heads_triton(q, k, preparation)

    def take_rows(self, table: Tensor, index: Tensor, factor: float = 1.0) -> Tensor:
        return take_rows_triton(table, index, factor)

    def take_own_rows(self, table: Tensor, index: Tensor, first: int, rows: int, factor: float = 1.0) -> Tensor:
        return take_own_rows(take_rows_triton, table, index, first, rows, factor)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return softcap_triton(x, cap)

    @property
    def int8_product(self) -> Int8Product:
        return int8_product_triton

    def router_logits(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return router_logits_triton(x, weight, bias)

    def choose_experts(self, logits: Tensor, top_k: int, *, renormalise: bool) -> Routing:
        return choose_experts_triton(logits, top_k, renormalise=renormalise)

    def mix_experts(self, x: Tensor, routing: Routing, experts: ExpertWeights, activation: ExpertActivation) -> Tensor:
        return mix_experts_triton(x, routing, experts, activation)
