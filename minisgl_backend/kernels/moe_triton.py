"""The experts of a sparse MLP on a GPU, in Triton: see kernels/moe.py for what is computed.

Places (one of a token's top_k choices) are sorted by expert and each expert's are padded to whole blocks, so that a
block of the product has one expert's weights to read; the tokens themselves are never moved. The idea is that of
MegaBlocks (Gale et al. 2022) in the form of vLLM's fused MoE. Three launches:

    inner[place]  = activation(gate · x[token] + …, up · x[token] + …)
    out[place]    = down · inner[place] + …
    mixed[token]  = Σ weight · out[place], over the token's places in their order: no atomics, the same in every run

Nothing depends on what the host knows of the routing, so that a graph can hold it. Products sum in fp32.

Imported on CUDA, and by the test that runs it in Triton's interpreter (TRITON_INTERPRET=1, set before the import).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.moe import ExpertActivation, ExpertWeights, Routing

_KINDS = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2}


@dataclass(frozen=True, slots=True)
class Blocks:
    """The places of a step, sorted by expert, in blocks of one expert each."""

    places: Tensor  # [blocks · size] int32: token · top_k + choice; `empty` where a block has nothing
    experts: Tensor  # [blocks] int32: whose block it is; -1: nobody's, there are fewer blocks than there might be
    size: int
    empty: int  # tokens · top_k: beyond every place


def sort_into_blocks(chosen: Tensor, num_experts: int, size: int) -> Blocks:
    """chosen [tokens, top_k] int64, or NO_EXPERT, whose places are in no block. Nothing waits for the device.

    As many blocks as there may ever be: each expert that is used wastes less than one.
    """
    flat, device = chosen.flatten(), chosen.device
    empty = flat.numel()
    num_blocks = min(empty, empty // size + num_experts)
    by_expert, order = flat.sort(stable=True)
    bounds = torch.searchsorted(by_expert, torch.arange(num_experts + 1, device=device))
    begins, counts = bounds[:-1], bounds.diff()
    blocks_of = (counts + size - 1) // size
    last_block = blocks_of.cumsum(0)
    experts = torch.searchsorted(last_block, torch.arange(num_blocks, device=device), right=True)

    places = torch.full((num_blocks * size + 1,), empty, dtype=torch.int32, device=device)  # the last takes NO_EXPERTs
    own = by_expert.clamp(min=0)
    shift = (last_block - blocks_of) * size - begins
    targets = torch.where(by_expert < 0, num_blocks * size, torch.arange(empty, device=device) + shift[own])
    places.scatter_(0, targets, order.to(torch.int32))
    return Blocks(places[:-1], torch.where(experts < num_experts, experts, -1).to(torch.int32), size, empty)


def mix_experts_triton(x: Tensor, routing: Routing, experts: ExpertWeights, activation: ExpertActivation) -> Tensor:
    """See ExpertsOp. x contiguous in its last dimension."""
    (tokens, hidden), (num_experts, _, inner) = x.shape, experts.down.shape
    top_k = routing.experts.shape[1]
    mixed = torch.empty_like(x, memory_format=torch.contiguous_format)
    if tokens == 0:
        return mixed
    tile = _tile(tokens * top_k, num_experts)
    blocks = sort_into_blocks(routing.experts, num_experts, tile.places)
    num_blocks = len(blocks.experts)
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    biases = experts.gate_up_bias is not None
    inners = x.new_empty(tokens * top_k, inner)
    _gate_up[(num_blocks, triton.cdiv(inner, tile.columns))](
        x, experts.gate_up, experts.gate_up_bias, inners, blocks.places, blocks.experts, blocks.empty,
        hidden, inner, x.stride(0), activation.alpha, activation.limit,
        TOP_K=top_k, KIND=_KINDS[activation.kind], BIASES=biases, PRECISION=precision,
        PLACES=tile.places, COLUMNS=tile.columns, DEPTH=tile.depth,
    )  # fmt: skip
    outs = x.new_empty(tokens * top_k, hidden)
    _down[(num_blocks, triton.cdiv(hidden, tile.columns))](
        inners, experts.down, experts.down_bias, outs, blocks.places, blocks.experts, blocks.empty,
        inner, hidden, BIASES=biases, PRECISION=precision,
        PLACES=tile.places, COLUMNS=tile.columns, DEPTH=tile.depth,
    )  # fmt: skip
    columns = min(1024, triton.next_power_of_2(hidden))
    _reduce[(tokens, triton.cdiv(hidden, columns))](
        outs, routing.experts.contiguous(), routing.weights.contiguous(), mixed, hidden, TOP_K=top_k, COLUMNS=columns
    )
    return mixed


@dataclass(frozen=True, slots=True)
class _Tile:
    """What one program computes: places × columns, in steps of depth. At least 16 each, as tensor cores ask for."""

    places: int
    columns: int
    depth: int


def _tile(num_places: int, num_experts: int) -> _Tile:
    """By how many places an expert has. Chosen by reasoning, not measured on a GPU yet: few places, mostly memory."""
    share = num_places // num_experts
    if share <= 16:
        return _Tile(16, 64, 64)
    return _Tile(64, 64, 32) if share <= 64 else _Tile(128, 64, 32)


@triton.jit
def _gate_up(
    x, weight, bias, out, places, experts, empty,
    hidden, inner, x_stride, alpha, limit,
    TOP_K: tl.constexpr, KIND: tl.constexpr, BIASES: tl.constexpr, PRECISION: tl.constexpr,
    PLACES: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One block of places × some columns of gate and the same of up."""
    expert = tl.load(experts + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(places + tl.program_id(0) * PLACES + tl.arange(0, PLACES)).to(tl.int64)
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
    if BIASES:
        at = bias + expert * 2 * inner + column
        gate += tl.load(at, inside, 0.0).to(tl.float32)[None, :]
        up += tl.load(at + inner, inside, 0.0).to(tl.float32)[None, :]
    if KIND == 0:
        value = gate * tl.sigmoid(gate) * up
    elif KIND == 1:  # tanh(z) = 2 · sigmoid(2z) - 1
        z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        value = gate * tl.sigmoid(2 * z) * up
    else:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        value = gate * tl.sigmoid(alpha * gate) * (up + 1)
    target = out + place[:, None] * inner + column[None, :]
    tl.store(target, value.to(out.dtype.element_ty), there[:, None] & inside[None, :])


@triton.jit
def _down(
    x, weight, bias, out, places, experts, empty,
    inner, hidden, BIASES: tl.constexpr, PRECISION: tl.constexpr,
    PLACES: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One block of places × some columns. x and out have a row for each place."""
    expert = tl.load(experts + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(places + tl.program_id(0) * PLACES + tl.arange(0, PLACES)).to(tl.int64)
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
    if BIASES:
        total += tl.load(bias + expert * hidden + column, inside, 0.0).to(tl.float32)[None, :]
    target = out + place[:, None] * hidden + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), there[:, None] & inside[None, :])


@triton.jit
def _reduce(outs, experts, weights, mixed, hidden, TOP_K: tl.constexpr, COLUMNS: tl.constexpr):
    """One token × some columns. Places without an expert were never written: they are not read."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < hidden
    total = tl.zeros((COLUMNS,), tl.float32)
    for choice in range(TOP_K):
        place = token * TOP_K + choice
        chosen = tl.load(experts + place) >= 0
        readable = column < tl.where(chosen, hidden, 0)
        out = tl.load(outs + place * hidden + column, readable, 0.0).to(tl.float32)
        total += tl.where(chosen, tl.load(weights + place), 0.0) * out
    tl.store(mixed + token * hidden + column, total.to(mixed.dtype.element_ty), inside)
