"""llama.cpp's blocks (ggml), kept as they lie in a GGUF file.

A row is a sequence of blocks of 32 values (256 in the K types), each with its own scale. What `unpack` gives is what
the `gguf` package's dequantize gives, bit for bit: tests/unit/layers/test_gguf_blocks.py. Layouts: ggml-common.h of
llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl_backend.layers.quant.gguf_types import BlockType


@dataclass(frozen=True, slots=True)
class GgufRows:
    """See StoredRows. data uint8 [rows, bytes of a row], may be mapped; type: one of BLOCK_TYPES."""

    type: BlockType
    data: Tensor
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.columns

    def dense(self, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        return unpack(self.type, self.data[rows]).to(dtype)


def unpack(type: BlockType, data: Tensor) -> Tensor:
    """data uint8 [rows, bytes of a row] → fp32 [rows, columns], a new tensor."""
    return _UNPACK[type.name](data.reshape(-1, type.bytes)).reshape(data.shape[0], -1)


def _halves(blocks: Tensor, at: int) -> Tensor:
    """An fp16 in each block → fp32 [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """uint8 [n, bytes] → [n, 2 * bytes]: the low four bits of all, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _f32(blocks: Tensor) -> Tensor:
    return blocks.clone(memory_format=torch.contiguous_format).view(torch.float32)


def _f16(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.float16).float()


def _bf16(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.bfloat16).float()


def _q8_0(blocks: Tensor) -> Tensor:
    """scale, 32 signed bytes."""
    return blocks[:, 2:].contiguous().view(torch.int8).float().mul_(_halves(blocks, 0))


def _q4_0(blocks: Tensor) -> Tensor:
    """scale, 32 nibbles around 8."""
    return _nibbles(blocks[:, 2:]).float().sub_(8.0).mul_(_halves(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    """scale, minimum, 32 nibbles."""
    return _nibbles(blocks[:, 4:]).float().mul_(_halves(blocks, 0)).add_(_halves(blocks, 2))


def _q4_k(blocks: Tensor) -> Tensor:
    """scale of the scales, scale of the minima, eight of both in 6 bits each, 256 nibbles in runs of 32 bytes."""
    low, high, rest = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = torch.cat((low & 63, (rest & 15) | ((low >> 6) << 4)), dim=-1).float()
    minima = torch.cat((high & 63, (rest >> 4) | ((high >> 6) << 4)), dim=-1).float()
    scales, minima = _halves(blocks, 0) * scales, _halves(blocks, 2) * minima
    values = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32).float()
    return values.mul_(scales.unsqueeze(-1)).sub_(minima.unsqueeze(-1))


def _q6_k(blocks: Tensor) -> Tensor:
    """low nibbles and high pairs of bits of 256 values around 32, sixteen scales of a signed byte, their scale."""
    low = blocks[:, :128].reshape(-1, 2, 64)
    low = torch.stack((low & 15, low >> 4), dim=2).reshape(-1, 2, 4, 32)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    high = torch.cat([(pairs >> shift) & 3 for shift in (0, 2, 4, 6)], dim=2)
    values = (low | (high << 4)).reshape(-1, 16, 16).float().sub_(32.0)
    scales = _halves(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return values.mul_(scales.unsqueeze(-1))


_UNPACK: Mapping[str, Callable[[Tensor], Tensor]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
"""Each takes blocks uint8 [blocks, bytes] → fp32, a new tensor of blocks * values."""
