"""What becomes of queries, keys and values on their way from the projection to attention: one launch on a GPU.

Norms of heads, rotation, and the writing of keys and values into their pages: see HeadPreparation, kernels/rotary.py
and kernels/paged_kv.py for what is computed. Rounded where the references round. Nothing is read by the host, so that
a graph can hold the launch. Rotation and the write of the cache in one launch: the idea of vLLM's and FlashInfer's
fused kernels.

A program takes ROWS heads of one kind, whichever tokens they are of; programs of queries come first, then those of
keys, then those of values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.gpu.norm import weighted
from minisgl_backend.kernels.gpu.tiles import row_tile
from minisgl_backend.kernels.interface import HeadPreparation


def prepare_and_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    preparation: HeadPreparation | None,
    k_pages: Tensor,
    v_pages: Tensor,
    places: Tensor,
) -> Tensor:
    """HeadPreparation and `write_kv` in one launch → q, prepared: a new tensor without gaps; without a preparation q.

    q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim], vectors may have gaps between them. k_pages,
    v_pages [pages, page_size, kv_heads, head_dim], contiguous, of the same dtype: mutated. places [tokens] int32 or
    int64: page · page_size + offset. A preparation's `kernels` are not asked: these are used.
    """
    assert k_pages.is_contiguous() and v_pages.is_contiguous(), "pages lie without gaps"
    prepared = q if preparation is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _launch((q, k, v), (prepared, k_pages, v_pages), preparation, places)
    return prepared


def prepare_heads_triton(q: Tensor, k: Tensor, preparation: HeadPreparation) -> tuple[Tensor, Tensor]:
    """See Kernels.prepare_heads: new tensors without gaps."""
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    _launch((q, k, None), (q_out, k_out, None), preparation, None)
    return q_out, k_out


def _launch(
    inputs: tuple[Tensor, Tensor, Tensor | None],
    outs: tuple[Tensor, Tensor, Tensor | None],
    preparation: HeadPreparation | None,
    places: Tensor | None,
) -> None:
    """inputs, outs: q, k, v. places: of keys and values; None: token t's lies at t, and there are no values."""
    q, k, v = inputs
    (tokens, heads, head_dim), kv_heads = q.shape, k.shape[1]
    rotation = None if preparation is None else preparation.rotation
    q_norm, k_norm, eps = (None, None, 0.0) if preparation is None else _norms(preparation)
    queries = 0 if preparation is None else tokens * heads  # without a preparation they stay where they are
    tile = row_tile(queries + 2 * tokens * kv_heads, head_dim)
    q_programs, kv_programs = triton.cdiv(queries, tile.rows), triton.cdiv(tokens * kv_heads, tile.rows)
    programs = q_programs + (1 if v is None else 2) * kv_programs
    if programs == 0:
        return
    strides = [stride for x in (q, k, k if v is None else v) for stride in (x.stride(0), x.stride(1))]
    cos, sin = (None, None) if rotation is None else (rotation.cos, rotation.sin)
    assert cos is None or sin is None or cos.stride() == sin.stride(), "cos and sin lie alike"
    assert all(x is None or x.stride(-1) == 1 or x.shape[-1] == 1 for x in (*inputs, cos)), "no gaps in vectors"
    _prepare_and_write[(programs,)](
        *inputs, *outs, places, q_norm, k_norm, cos, sin, tokens, heads, kv_heads, *strides,
        0 if cos is None else cos.stride(0), eps,
        HEAD_DIM=head_dim, ROTARY_DIM=0 if cos is None else 2 * cos.shape[-1],
        INTERLEAVED=rotation is not None and rotation.interleaved, QUERIES=queries > 0,
        ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.warps,
    )  # fmt: skip


def _norms(preparation: HeadPreparation) -> tuple[Tensor | None, Tensor | None, float]:
    assert (preparation.q_norm is None) == (preparation.k_norm is None), "both norms are there, or none"
    return preparation.q_norm, preparation.k_norm, preparation.eps


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["places"])
def _prepare_and_write(
    q, k, v, q_out, k_out, v_out, places, q_norm, k_norm, cos, sin, tokens, heads, kv_heads,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride, angle_stride, eps,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, QUERIES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """ROWS heads: of queries, of keys or of values."""
    program = tl.program_id(0)
    q_programs = 0
    if QUERIES:
        q_programs = tl.cdiv(tokens * heads, ROWS)
    kv_programs = tl.cdiv(tokens * kv_heads, ROWS)
    at = tl.arange(0, COLUMNS)
    if program < q_programs:
        if QUERIES:
            row = program * ROWS + tl.arange(0, ROWS)
            token, head, there = row // heads, row % heads, row < tokens * heads
            begin = token.to(tl.int64) * q_token_stride + head * q_head_stride
            value = _prepared(
                q, begin, there, q_norm, cos, sin, token.to(tl.int64) * angle_stride, eps,
                HEAD_DIM, ROTARY_DIM, INTERLEAVED, COLUMNS,
            )  # fmt: skip
            mask = there[:, None] & (at < HEAD_DIM)[None, :]
            tl.store(q_out + row.to(tl.int64)[:, None] * HEAD_DIM + at[None, :], value, mask)
    else:
        of_keys = program < q_programs + kv_programs
        first = q_programs + tl.where(of_keys, 0, kv_programs)
        row = (program - first) * ROWS + tl.arange(0, ROWS)
        token, head, there = row // kv_heads, row % kv_heads, row < tokens * kv_heads
        mask = there[:, None] & (at < HEAD_DIM)[None, :]
        place = token.to(tl.int64)
        if places is not None:
            place = tl.load(places + token, there, 0).to(tl.int64)
        target = (place * kv_heads + head)[:, None] * HEAD_DIM + at[None, :]
        if of_keys:
            begin = token.to(tl.int64) * k_token_stride + head * k_head_stride
            value = _prepared(
                k, begin, there, k_norm, cos, sin, token.to(tl.int64) * angle_stride, eps,
                HEAD_DIM, ROTARY_DIM, INTERLEAVED, COLUMNS,
            )  # fmt: skip
            tl.store(k_out + target, value, mask)
        else:
            if v is not None:
                begin = token.to(tl.int64) * v_token_stride + head * v_head_stride
                tl.store(v_out + target, tl.load(v + begin[:, None] + at[None, :], mask), mask)


@triton.jit
def _prepared(
    x, begin, there, norm, cos, sin, angles, eps,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The heads at `begin` [ROWS], whose angles are at `angles` → [ROWS, COLUMNS] of x's dtype.

    Each number's partner in its rotation is read again, and comes from the cache: one path serves every layout.
    """
    at = tl.arange(0, COLUMNS)
    inside = there[:, None] & (at < HEAD_DIM)[None, :]
    value = tl.load(x + begin[:, None] + at[None, :], inside, 0.0)
    scale = tl.zeros_like(begin).to(tl.float32)
    if norm is not None:
        wide = value.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / HEAD_DIM + eps)
        factor = tl.load(norm + at, at < HEAD_DIM, 0.0)
        value = weighted(wide * scale[:, None], factor[None, :], x.dtype.element_ty)
    if ROTARY_DIM > 0:
        turns = at < ROTARY_DIM
        if INTERLEAVED:
            partner, angle, is_first = at ^ 1, at // 2, at % 2 == 0
        else:
            is_first = at < ROTARY_DIM // 2
            partner = tl.where(is_first, at + ROTARY_DIM // 2, at - ROTARY_DIM // 2)
            angle = tl.where(is_first, at, partner)
        mask = there[:, None] & turns[None, :]
        other = tl.load(x + begin[:, None] + partner[None, :], mask, 0.0)
        if norm is not None:
            factor = tl.load(norm + partner, turns, 0.0)
            other = weighted(other.to(tl.float32) * scale[:, None], factor[None, :], x.dtype.element_ty)
        cosine = tl.load(cos + angles[:, None] + angle[None, :], mask, 0.0)
        sine = tl.load(sin + angles[:, None] + angle[None, :], mask, 0.0)
        crossed = other.to(tl.float32) * sine
        rotated = value.to(tl.float32) * cosine + tl.where(is_first[None, :], -crossed, crossed)
        value = tl.where(turns[None, :], rotated.to(x.dtype.element_ty), value)
    return value
