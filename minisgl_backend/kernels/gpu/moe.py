"""The experts of a sparse MLP on a GPU: see kernels/moe.py for what is computed, and where it is rounded.

Places (one of a token's top_k choices) come in blocks of one expert each (expert_blocks.py). Three launches:

    inner[place]  = activation(gate · x[token] + …, up · x[token] + …)
    out[place]    = down · inner[place] + …
    mixed[token]  = Σ weight · out[place], over the token's places in their order: no atomics, the same in every run

Nothing depends on what the host knows of the routing, so that a graph can hold it. Products sum in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.gpu.activation import GELU_TANH, SILU, activated
from minisgl_backend.kernels.gpu.expert_blocks import Blocks, sort_into_blocks
from minisgl_backend.kernels.gpu.tiles import cut_tile, precision_of
from minisgl_backend.kernels.moe import ExpertActivation, ExpertWeights, Routing

CLAMPED_SWIGLU = tl.constexpr(2)
_KINDS = {"silu": SILU.value, "gelu_tanh": GELU_TANH.value, "clamped_swiglu": CLAMPED_SWIGLU.value}


def mix_experts_triton(x: Tensor, routing: Routing, experts: ExpertWeights, activation: ExpertActivation) -> Tensor:
    """See ExpertsOp. x contiguous in its last dimension; x and weights of one dtype."""
    (tokens, hidden), (num_experts, _, inner) = x.shape, experts.down.shape
    chosen, top_k = routing.experts.contiguous(), routing.experts.shape[1]
    mixed = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    if tokens == 0:
        return mixed
    tile = product_tile(tokens * top_k, num_experts, x.element_size())
    blocks = sort_into_blocks(chosen, num_experts, tile.places)
    inners = x.new_empty(tokens * top_k, inner)
    _launch_gate_up(x, experts, activation, blocks, tile, top_k, inners)
    outs = x.new_empty(tokens * top_k, hidden)
    _launch_down(inners, experts, blocks, tile, outs)
    columns = cut_tile(tokens, hidden)
    _reduce[(tokens, triton.cdiv(hidden, columns.columns))](
        outs, chosen, routing.weights.contiguous(), mixed, hidden,
        TOP_K=top_k, COLUMNS=columns.columns, num_warps=columns.warps,
    )  # fmt: skip
    return mixed


@dataclass(frozen=True, slots=True)
class ProductTile:
    """What one program computes: places × columns, in steps of depth. At least 16 each, as tensor cores ask for.

    Of gate and up a program computes as many columns each. Shared memory: at most 96 KiB, which every GPU from Ampere
    on has.
    """

    places: int
    gate_columns: int
    down_columns: int
    depth: int
    warps: int
    stages: int  # of the loop over depth: what is loaded ahead


def product_tile(num_places: int, num_experts: int, element_bytes: int) -> ProductTile:
    """By how many places an expert has. Chosen by reasoning, not measured on a GPU yet.

    Few places: the time is that of reading weights, so rows of 256 bytes, many programs, and much in flight. Many: that
    of tensor cores, so large tiles.
    """
    share = num_places // num_experts
    if share <= 16 or (share <= 32 and element_bytes == 4):  # in fp32 the next one spills
        return ProductTile(16, 32, 64, 256 // element_bytes, 4, 4)
    if share <= 32:
        return ProductTile(32, 32, 64, 256 // element_bytes, 4, 3)
    if share <= 64 or element_bytes == 4:  # in fp32 larger ones spill: no tensor core holds their sums
        return ProductTile(64, 64, 64, 128 // element_bytes, 2 * element_bytes, 3)
    return ProductTile(128, 64, 128, 128 // element_bytes, 8, 3)


def _launch_gate_up(
    x: Tensor,
    experts: ExpertWeights,
    activation: ExpertActivation,
    blocks: Blocks,
    tile: ProductTile,
    top_k: int,
    inners: Tensor,
) -> None:
    inner = experts.down.shape[2]
    _gate_up[(len(blocks.experts), triton.cdiv(inner, tile.gate_columns))](
        x, experts.gate_up, experts.gate_up_bias, inners, blocks.places, blocks.experts, blocks.empty,
        x.shape[1], inner, x.stride(0), activation.alpha, activation.limit,
        TOP_K=top_k, KIND=_KINDS[activation.kind], PRECISION=precision_of(x),
        PLACES=tile.places, COLUMNS=tile.gate_columns, DEPTH=tile.depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _launch_down(inners: Tensor, experts: ExpertWeights, blocks: Blocks, tile: ProductTile, outs: Tensor) -> None:
    hidden, inner = experts.down.shape[1:]
    _down[(len(blocks.experts), triton.cdiv(hidden, tile.down_columns))](
        inners, experts.down, experts.down_bias, outs, blocks.places, blocks.experts, blocks.empty,
        inner, hidden, PRECISION=precision_of(inners),
        PLACES=tile.places, COLUMNS=tile.down_columns, DEPTH=tile.depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["empty"])
def _gate_up(
    x, weight, bias, out, places, experts, empty,
    hidden, inner, x_stride, alpha, limit,
    TOP_K: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
    PLACES: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One block of places × some columns of gate and the same of up."""
    expert = tl.load(experts + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    place = _places(places, empty, PLACES)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, DEPTH)
    there, inside = place < empty, column < inner
    rows = x + (place // TOP_K)[:, None] * x_stride
    gates = weight + (expert * 2 * inner + column)[None, :] * hidden
    ups = weight + ((expert * 2 + 1) * inner + column)[None, :] * hidden
    gate = tl.zeros((PLACES, COLUMNS), tl.float32)
    up = tl.zeros((PLACES, COLUMNS), tl.float32)
    for begin in range(0, hidden, DEPTH):
        k = begin + step
        within = k < hidden
        a = tl.load(rows + k[None, :], there[:, None] & within[None, :], 0.0)
        mask = within[:, None] & inside[None, :]
        gate = tl.dot(a, tl.load(gates + k[:, None], mask, 0.0), gate, input_precision=PRECISION)
        up = tl.dot(a, tl.load(ups + k[:, None], mask, 0.0), up, input_precision=PRECISION)
    if bias is not None:
        at = bias + expert * 2 * inner + column
        gate += tl.load(at, inside, 0.0).to(tl.float32)[None, :]
        up += tl.load(at + inner, inside, 0.0).to(tl.float32)[None, :]
    gate, up = _rounded(gate, out.dtype.element_ty), _rounded(up, out.dtype.element_ty)
    if KIND == CLAMPED_SWIGLU:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        switch = _rounded(tl.sigmoid(_rounded(alpha * gate, out.dtype.element_ty)), out.dtype.element_ty)
        value, up = gate * switch, _rounded(up + 1, out.dtype.element_ty)
    else:
        value = activated(gate, KIND)
    value = _rounded(value, out.dtype.element_ty) * up
    target = out + place[:, None] * inner + column[None, :]
    tl.store(target, value.to(out.dtype.element_ty), there[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["empty"])
def _down(
    x, weight, bias, out, places, experts, empty,
    inner, hidden, PRECISION: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One block of places × some columns. x and out have a row for each place."""
    expert = tl.load(experts + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    place = _places(places, empty, PLACES)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, DEPTH)
    there, inside = place < empty, column < hidden
    rows = x + place[:, None] * inner
    downs = weight + (expert * hidden + column)[None, :] * inner
    total = tl.zeros((PLACES, COLUMNS), tl.float32)
    for begin in range(0, inner, DEPTH):
        k = begin + step
        within = k < inner
        a = tl.load(rows + k[None, :], there[:, None] & within[None, :], 0.0)
        b = tl.load(downs + k[:, None], within[:, None] & inside[None, :], 0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    if bias is not None:
        total += tl.load(bias + expert * hidden + column, inside, 0.0).to(tl.float32)[None, :]
    target = out + place[:, None] * hidden + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), there[:, None] & inside[None, :])


@triton.jit
def _places(places, empty, PLACES: tl.constexpr):
    """Of this program's block, int64: those that were sorted into it, or the one of its own number."""
    lane = tl.arange(0, PLACES)
    if places is not None:
        return tl.load(places + tl.program_id(0) * PLACES + lane).to(tl.int64)
    else:
        return tl.where(lane == 0, tl.program_id(0), empty).to(tl.int64)


@triton.jit
def _rounded(value, DTYPE: tl.constexpr):
    """To the dtype of the model, as the reference does between its operations; and back to fp32."""
    return value.to(DTYPE).to(tl.float32)


@triton.jit
def _reduce(outs, experts, weights, mixed, hidden, TOP_K: tl.constexpr, COLUMNS: tl.constexpr):
    """One token × some columns. Places without an expert were never written: they are not read."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for choice in tl.static_range(TOP_K):
        place = token * TOP_K + choice
        chosen = tl.load(experts + place) >= 0
        readable = column < tl.where(chosen, hidden, 0)
        out = tl.load(outs + place * hidden + column, readable, 0.0).to(tl.float32)
        total += tl.where(chosen, tl.load(weights + place), 0.0) * out
    tl.store(mixed + token * hidden + column, total.to(mixed.dtype.element_ty), column < hidden)
