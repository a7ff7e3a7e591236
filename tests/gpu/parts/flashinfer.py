"""FlashInfer, prebuilt by build_flashinfer.py: its numbers against the truth, graphs, and its speed beside ours.

Bf16 alone, as its kernels were built. Dry, a fake takes its place, which checks the calls (tests/fakes/flashinfer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from load.bench.gpu_clock import GpuClock
from load.bench.gpu_models import triton_attention
from load.bench.kernels_gpu_cases import AttentionShape, paged_rows
from minisgl_backend.attention.flashinfer_phases import FlashInferPhases
from minisgl_backend.attention.gpu_backend import GpuAttention
from minisgl_backend.attention.interface import AttentionVariant, RecordableAttention, StepRows
from minisgl_backend.attention.triton_phases import TritonChunks, TritonDecode
from minisgl_backend.device.device import Device, open_device
from minisgl_backend.device.staging import Staging
from minisgl_backend.kernels.gpu.flashinfer import FlashInfer, load_flashinfer
from minisgl_backend.kvpool.paged import PagedKvPool
from tests.gpu.checks import ROUNDING, Found, Place, Report, compare
from tests.gpu.parts.attention import Shape, case_of, check_step, new_tokens, pool_of, row_lists

PLAIN = AttentionVariant(0.125)
PAIRS = (("flashinfer", "flashinfer"), ("flashinfer", "triton"), ("triton", "flashinfer"))
"""Backends of chunks and of decode rows."""


def run(report: Report, place: Place) -> None:
    """What was not built is refused (FLASHINFER_DISABLE_JIT), and so a failed check."""
    device = open_device("cuda" if not place.dry else "cpu")
    flashinfer = fake_flashinfer() if place.dry else load_flashinfer(device.capability)
    report.tell(flashinfer=flashinfer.version)
    for pair in PAIRS:
        backend_of = partial(attention, flashinfer, device, pair)
        for rows in row_lists(place):
            for shape in shapes(place):
                name = f"{pair[0]},{pair[1]} {rows} {shape}"
                report.check(name, partial(check_step, place, backend_of, place.half, rows, shape))
    backend_of = partial(attention, flashinfer, device, PAIRS[0])
    for shape in shapes(place):
        report.check(f"graph = eager {shape}", partial(check_graph, place, device, backend_of, shape))
    clock = GpuClock(place.device)
    for speed in speeds(place):
        report.check(f"speed {speed}", partial(compare_speed, place, clock, backend_of, speed), needs_s=3)


def shapes(place: Place) -> tuple[Shape, ...]:
    """Decode on CUDA cores (SmolLM2, Qwen3-0.6B) and on tensor cores (Llama 3, Qwen3-30B-A3B); any page size."""
    return place.pick(
        (
            Shape(9, 3, 64, 5, PLAIN),
            Shape(16, 8, 128, 16, PLAIN),
            Shape(32, 8, 128, 1, PLAIN),
            Shape(32, 4, 128, 16, PLAIN),
        ),
        (Shape(2, 1, 64, 4, PLAIN), Shape(4, 1, 64, 3, PLAIN)),
    )


def speeds(place: Place) -> tuple[AttentionShape, ...]:
    """Decode at long contexts and at many rows, prompts, and a chunk behind a prefix."""
    return place.pick(
        (
            AttentionShape(1, 65535, 1),
            AttentionShape(8, 8191, 1),
            AttentionShape(64, 4095, 1),
            AttentionShape(64, 4095, 1, heads=16),
            AttentionShape(256, 1023, 1, kv_heads=4),
            AttentionShape(1, 0, 4096),
            AttentionShape(1, 6144, 2048),
        ),
        (AttentionShape(2, 9, 1, 2, 1, 64),),
    )


def fake_flashinfer() -> FlashInfer:
    from fakes import flashinfer as fake

    return FlashInfer("fake", fake.BatchPrefillWithPagedKVCacheWrapper, fake.BatchDecodeWithPagedKVCacheWrapper)


def attention(
    flashinfer: FlashInfer,
    device: Device,
    pair: tuple[str, str],
    pool: PagedKvPool,
    variants: Sequence[AttentionVariant],
    heads: int,
) -> GpuAttention:
    """pair: backends of chunks and of decode rows."""
    phases = FlashInferPhases(pool, variants, heads, flashinfer, device.streams.mark)
    return GpuAttention(
        pool,
        variants,
        chunks=phases.chunks if pair[0] == "flashinfer" else TritonChunks(pool, variants, heads),
        decode=phases.decode if pair[1] == "flashinfer" else TritonDecode(pool, variants),
        upload=Staging(device.streams).upload,
    )


def check_graph(place: Place, device: Device, backend_of: Callable[..., Any], shape: Shape) -> Found:
    """Decode rows captured at the begin of their contexts, replayed at the end, after a plan."""
    case = case_of(place.half, row_lists(place)[0], shape)
    pool = pool_of(case, place)
    backend: RecordableAttention = backend_of(pool, case.variants, shape.heads)
    given, tables = new_tokens(case, place), case.step.page_tables.to(place.device).contiguous()
    positions = torch.zeros(len(case.rows), dtype=torch.int64, device=place.device)
    with torch.inference_mode():
        step = backend.decode_step(positions, tables)
        step.refresh(np.zeros(len(case.rows), np.int64), tables)
        graph, out = (device.recorder() or _Again)(lambda: step.begin().attend(0, *given))
        for into, source in zip(pool.layer(0), case.pool.layer(0), strict=True):
            into.copy_(source)  # the capture has written there
        positions.copy_(torch.from_numpy(case.step.starts))
        step.refresh(case.step.starts, tables)
        graph.replay()
    tolerance = 3 * ROUNDING[place.half]
    return compare(out, case.expected(0), rms=tolerance, most=30 * tolerance)


class _Again:
    """Dry, a recording does its work again."""

    def __init__(self, work: Callable[[], Tensor]) -> None:
        self._work, self._out = work, work()

    def __iter__(self) -> Iterator[Any]:
        return iter((self, self._out))

    def replay(self) -> None:
        self._out.copy_(self._work())


def compare_speed(place: Place, clock: GpuClock, backend_of: Callable[..., Any], shape: AttentionShape) -> Found:
    """Medians of one layer's attention in ms, and the bytes per second of decode rows; both give the same numbers."""
    pool, rows = paged_rows(shape, place.device, place.half)
    variants = (AttentionVariant(shape.dim**-0.5),)
    tokens = shape.rows * shape.length
    q, k, v = (
        torch.randn(tokens, heads, shape.dim, device=place.device).to(place.half)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    found: dict[str, float] = {}
    outs: list[Tensor] = []
    touched = 2.0 * shape.rows * (shape.start + shape.length) * shape.kv_heads * shape.dim * q.itemsize + 2 * q.nbytes
    with torch.inference_mode():
        for name, make in (("flashinfer", backend_of), ("triton", triton_attention)):
            begun = make(pool, variants, shape.heads).begin(StepRows(rows.starts, rows.lengths, rows.page_tables))
            outs.append(begun.attend(0, q, k, v))
            found[f"{name}_ms"] = clock.median_ms(partial(begun.attend, 0, q, k, v))
            found[f"{name}_gb_per_s"] = touched / found[f"{name}_ms"] / 1e6
    compare(*outs, rms=4 * ROUNDING[place.half], most=100 * ROUNDING[place.half])
    found["triton_speed"] = found["flashinfer_ms"] / found["triton_ms"]
    return {key: float(f"{value:.4g}") for key, value in found.items()}
