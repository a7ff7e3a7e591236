"""A router on a GPU, its logits and its choice: see kernels/moe.py for what is computed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.moe import Routing, router_logits

_FEW_TOKENS = 16  # up to here the time of a product is that of its three launches


def router_logits_triton(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `router_logits`. A few tokens take one launch; more take the product, its input and output converted."""
    (tokens, hidden), num_experts = x.shape, weight.shape[0]
    if not 0 < tokens <= _FEW_TOKENS:
        return router_logits(x, weight, bias)
    assert weight.is_contiguous() and (x.stride(1) == 1 or hidden == 1), "numbers of a row lie side by side"
    logits = torch.empty((tokens, num_experts), dtype=torch.float32, device=x.device)
    _score[(num_experts, tokens)](
        x, weight, bias, logits, hidden, num_experts, x.stride(0),
        COLUMNS=min(triton.next_power_of_2(hidden), 1024), num_warps=4,
    )  # fmt: skip
    return logits


@triton.jit
def _score(x, weight, bias, logits, hidden, num_experts, x_stride, COLUMNS: tl.constexpr):
    """One expert's logit of one token."""
    expert, token = tl.program_id(0), tl.program_id(1)
    step = tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float64)
    for begin in range(0, hidden, COLUMNS):
        column = begin + step
        value = tl.load(x + token * x_stride + column, column < hidden, 0.0).to(tl.float64)
        total += value * tl.load(weight + expert * hidden + column, column < hidden, 0.0)
    logit = tl.sum(total, 0)
    if bias is not None:
        logit += tl.load(bias + expert)
    tl.store(logits + token * num_experts + expert, logit.to(tl.float32))


def choose_experts_triton(logits: Tensor, top_k: int, *, renormalise: bool) -> Routing:
    """logits [tokens, experts] fp32, without gaps. One launch."""
    tokens, num_experts = logits.shape
    assert logits.is_contiguous() and logits.dtype == torch.float32, "logits are fp32, without gaps"
    experts = torch.empty((tokens, top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    if tokens:
        _choose[(tokens,)](
            logits, experts, weights, num_experts,
            TOP_K=top_k, CHOICES=triton.next_power_of_2(top_k), RENORMALISE=renormalise,
            COLUMNS=triton.next_power_of_2(num_experts), num_warps=1,
        )  # fmt: skip
    return Routing(experts, weights)


@triton.jit
def _choose(
    logits, experts, weights, num_experts,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, RENORMALISE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One token. Each logit and its expert are one integer, whose order is that of the choice: above, 32 bits of the
    logit, as an integer that is ordered alike, with NaN above all; below, the more the lower the expert's number.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    logit = tl.load(logits + token * num_experts + column, column < num_experts, 0.0)
    bits = tl.where(logit == 0, 0.0, logit).to(tl.int32, bitcast=True)  # zeros of either sign are equal
    bits = tl.where(logit != logit, 0x7FC00000, _ordered(bits))
    key = (bits.to(tl.int64) << 32) + (0x7FFFFFFF - column)
    least = tl.full((COLUMNS,), -0x7FFFFFFFFFFFFFFF, tl.int64)  # below any logit
    key = tl.where(column < num_experts, key, least)
    choice = tl.arange(0, CHOICES)
    values = tl.full((CHOICES,), float("-inf"), tl.float32)
    greatest = 0.0
    for number in tl.static_range(TOP_K):
        best = tl.max(key, 0)
        key = tl.where(key == best, least, key)
        value = _ordered((best >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
        tl.store(experts + token * TOP_K + number, 0x7FFFFFFF - (best & 0x7FFFFFFF))
        values = tl.where(choice == number, value, values)
        if number == 0:
            greatest = value
    weight = tl.exp(values - greatest)
    if RENORMALISE:
        total = tl.sum(weight, 0)
    else:
        total = tl.sum(tl.where(column < num_experts, tl.exp(logit - greatest), 0.0), 0)
    tl.store(weights + token * TOP_K + choice, weight / total, choice < TOP_K)


@triton.jit
def _ordered(bits):
    """Bits of an fp32 → an int32 that is ordered as the numbers are; and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
