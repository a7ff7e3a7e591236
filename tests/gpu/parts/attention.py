"""Attention of mixed steps over pages, against what is written out over whole sequences in fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from fakes.attention_case import AttentionCase
from load.bench.gpu_stand import gpu_attention
from minisgl_backend.attention.gpu_backend import GpuAttention
from minisgl_backend.attention.interface import AttentionVariant, StepRows
from minisgl_backend.device.device import open_device
from minisgl_backend.kvpool.paged import KvShape, PagedKvPool
from tests.gpu.checks import ROUNDING, Found, Place, Report, compare, equal


def run(report: Report, place: Place) -> None:
    attention_of = partial(gpu_attention, "triton", open_device(place.device.type))
    for dtype in place.dtypes:
        for rows in row_lists(place):
            for shape in shapes(place):
                name = f"attention {rows} {shape} {str(dtype).removeprefix('torch.')}"
                report.check(name, partial(check_step, place, attention_of, dtype, rows, shape))
        name = f"recorded decode rows {str(dtype).removeprefix('torch.')}"
        report.check(name, partial(check_recorded, place, attention_of, dtype))


AttentionOf = Callable[[PagedKvPool, Sequence[AttentionVariant], int], GpuAttention]
"""(pool, variants of the layers, heads of queries)."""

Rows = tuple[tuple[int, int], ...]  # (tokens in the pool, tokens of this step)


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    page_size: int
    variant: AttentionVariant

    def __str__(self) -> str:
        words = [f"{self.heads}/{self.kv_heads} heads of {self.dim}", f"pages of {self.page_size}"]
        words += [f"window {self.variant.window}"] * bool(self.variant.window)
        words += ["capped"] * bool(self.variant.softcap) + ["sinks"] * self.variant.sinks
        return ", ".join(words)


def row_lists(place: Place) -> tuple[Rows, ...]:
    """Decode rows, chunks with and without a prefix, and both."""
    return place.pick(
        (
            ((0, 1), (1, 1), (15, 1), (16, 1), (257, 1), (4095, 1)),
            ((0, 5), (0, 129), (300, 77)),
            ((511, 1), (40, 64), (2000, 1), (0, 513), (77, 2), (5000, 40)),
        ),
        (((0, 1), (20, 1)), ((6, 1), (3, 5), (0, 4))),
    )


def shapes(place: Place) -> tuple[Shape, ...]:
    """Those of Llama 3, Qwen3-30B-A3B, gpt-oss, Gemma 2, SmolLM2."""
    plain = AttentionVariant(0.125)
    window, capped = AttentionVariant(0.1, window=128), AttentionVariant(0.1, window=64, softcap=30.0)
    sinks = AttentionVariant(0.125, window=128, sinks=True)
    return place.pick(
        (
            Shape(32, 8, 128, 16, plain),
            Shape(32, 4, 128, 16, window),
            Shape(64, 8, 64, 1, sinks),
            Shape(8, 4, 256, 16, capped),
            Shape(9, 3, 64, 5, plain),
        ),
        (
            Shape(4, 2, 16, 4, plain),
            Shape(3, 1, 16, 1, AttentionVariant(0.2, window=5, softcap=3.0, sinks=True)),
        ),
    )


def check_step(place: Place, attention_of: AttentionOf, dtype: torch.dtype, rows: Rows, shape: Shape) -> Found:
    case = case_of(dtype, rows, shape)
    pool = pool_of(case, place)
    backend = attention_of(pool, case.variants, shape.heads)
    step = StepRows(case.step.starts, case.step.lengths, case.step.page_tables.to(place.device))
    with torch.inference_mode():
        got = backend.begin(step).attend(0, *new_tokens(case, place))
    tolerance = 3 * ROUNDING[dtype]
    return compare(got, case.expected(0), rms=tolerance, most=30 * tolerance)


def check_recorded(place: Place, attention_of: AttentionOf, dtype: torch.dtype) -> Found:
    """The way that decode steps are recorded gives the very numbers of the way they are not."""
    shape, rows = shapes(place)[0], row_lists(place)[0]
    case = case_of(dtype, rows, shape)
    results = []
    for recorded in (False, True):
        pool = pool_of(case, place)
        backend = attention_of(pool, case.variants, shape.heads)
        tables = case.step.page_tables.to(place.device).contiguous()
        with torch.inference_mode():
            if recorded:
                step = backend.decode_step(torch.from_numpy(case.step.starts).to(place.device), tables)
                step.refresh(case.step.starts, tables)
                attention = step.begin()
            else:
                attention = backend.begin(StepRows(case.step.starts, case.step.lengths, tables))
            results.append(attention.attend(0, *new_tokens(case, place)).cpu())
    equal(torch.equal(*results), True, "the two ways")
    return None


def case_of(dtype: torch.dtype, rows: Rows, shape: Shape) -> AttentionCase:
    return AttentionCase(
        rows,
        shape.page_size,
        dtype,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        dim=shape.dim,
        variants=[shape.variant],
    )


def pool_of(case: AttentionCase, place: Place) -> PagedKvPool:
    """A copy of the case's on the device."""
    k_pages, v_pages = case.pool.layer(0)
    kind = KvShape(1, k_pages.shape[2], k_pages.shape[3], k_pages.dtype)
    pool = PagedKvPool(kind, case.pool.num_pages, case.page_size, place.device)
    for into, source in zip(pool.layer(0), (k_pages, v_pages), strict=True):
        into.copy_(source)
    return pool


def new_tokens(case: AttentionCase, place: Place) -> tuple[torch.Tensor | None, ...]:
    """What `attend` is given: queries, keys, values, sinks."""
    given = (case.queries, case.new(case.keys, 0), case.new(case.values, 0), case.sinks[0])
    return tuple(None if x is None else x.to(place.device) for x in given)
