"""The product with weights in int8 on a GPU: see layers/quant/int8.py for what is stored.

A weight crosses the memory bus in 8 bits, becomes a number of the model's dtype in registers (which is exact), and the
scale of an output is multiplied once, behind its sum: rounded less often than the reference, which rounds each weight
times its scale. Weight-only products of this form: LLM.int8() (Dettmers et al. 2022) without its outliers. Outputs are
the rows of the product and tokens its columns, so that the converted weights stay in registers where tensor cores take
them from there (Hopper), and a few tokens need no padding to 64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.gpu.tiles import precision_of

_MANY_PROGRAMS = 256  # about two for each multiprocessor of a large GPU


def int8_product_triton(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """See Int8Product. x [tokens, in], rows may have gaps between them. One launch."""
    (tokens, depth), outputs = x.shape, values.shape[0]
    assert values.is_contiguous() and scales.is_contiguous() and scales.numel() == outputs, "weights lie without gaps"
    assert values.dtype == torch.int8 and values.shape[1] == depth, (values.dtype, values.shape, x.shape)
    assert x.stride(1) == 1 or depth == 1, "numbers of a row lie side by side"
    out = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device)
    if tokens:
        tile = int8_tile(tokens, outputs, x.element_size())
        _multiply[(triton.cdiv(tokens, tile.tokens), triton.cdiv(outputs, tile.outputs))](
            x, values, scales, bias, out, tokens, outputs, depth, x.stride(0),
            PRECISION=precision_of(x),
            TOKENS=tile.tokens, OUTPUTS=tile.outputs, DEPTH=tile.depth, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out


@dataclass(frozen=True, slots=True)
class Int8Tile:
    """What one program computes: outputs × tokens, in steps of depth. Shared memory: at most 96 KiB."""

    tokens: int
    outputs: int
    depth: int
    warps: int
    stages: int  # of the loop over depth: what is loaded ahead


def int8_tile(tokens: int, outputs: int, element_bytes: int) -> Int8Tile:
    """element_bytes: of x. Few tokens: the time is that of reading weights. Chosen by reasoning, not measured yet."""
    shrink = element_bytes // 2
    if tokens <= 16:
        return Int8Tile(16, 64 if triton.cdiv(outputs, 64) >= _MANY_PROGRAMS else 32, 256 // shrink, 4, 4)
    if tokens <= 64:
        return Int8Tile(64, 64, 128 // shrink, 4, 3)
    return Int8Tile(128, 128, 64 // shrink, 8, 3)


@triton.jit(do_not_specialize=["tokens"])
def _multiply(
    x, values, scales, bias, out, tokens, outputs, depth, x_stride,
    PRECISION: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Some outputs of some tokens. Programs beside one another read the same weights."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    output = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    there, inside = token < tokens, output < outputs
    step = tl.arange(0, DEPTH)
    total = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    for begin in range(0, depth, DEPTH):
        k = begin + step
        within = k < depth
        weights = tl.load(values + output[:, None] * depth + k[None, :], inside[:, None] & within[None, :], 0)
        columns = tl.load(x + token[None, :] * x_stride + k[:, None], within[:, None] & there[None, :], 0.0)
        total = tl.dot(weights.to(x.dtype.element_ty), columns, total, input_precision=PRECISION)
    total *= tl.load(scales + output, inside, 0.0)[:, None]
    if bias is not None:
        total += tl.load(bias + output, inside, 0.0).to(tl.float32)[:, None]
    target = out + token[:, None] * outputs + output[None, :]
    tl.store(target, tl.trans(total).to(out.dtype.element_ty), there[:, None] & inside[None, :])
