"""FlashInfer's kernels behind our interface: their numbers, recorded steps, and their time beside that of our own.

Where there is no GPU, over the strict fake, so that each call has the real signature. On a GPU without the package, or
without the kernels that build_flashinfer.py makes, that is told in one failed check.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from fakes import flashinfer as fake
from load.bench.gpu_clock import GpuClock
from load.bench.gpu_models import CONFIGS
from load.bench.gpu_stand import PAGE_TOKENS, Stand, gpu_attention
from load.bench.kernels_gpu_cases import AttentionShape, paged_rows
from minisgl_backend.attention.interface import AttentionVariant
from minisgl_backend.device.device import Device, open_device
from minisgl_backend.kernels.gpu.flashinfer import FlashInfer, load_flashinfer
from tests.gpu.checks import Found, Place, Report, compare, equal
from tests.gpu.parts.attention import Shape, check_step

TOLERANCE = 0.03
"""Of logits, in 16 bits some layers deep: each way of cutting a row rounds otherwise."""


def run(report: Report, place: Place) -> None:
    _Part(report, place).run()


class _Part:
    def __init__(self, report: Report, place: Place) -> None:
        self.report, self.place = report, place
        self.device: Device = open_device(place.device.type)

    def run(self) -> None:
        loaded: list[FlashInfer] = []

        def load() -> Found:
            loaded.append(self._fake() if self.place.dry else load_flashinfer(self.device.capability))
            return {"version": loaded[0].version}

        if not self.report.check("it can be loaded", load):
            return
        with_package: Callable[[tuple[int, int]], FlashInfer] = lambda capability: loaded[0]  # noqa: E731
        attention = partial(gpu_attention, "flashinfer", self.device, load=with_package)
        rows = self.place.pick(((511, 1), (40, 64), (2000, 1), (0, 513), (77, 2)), ((6, 1), (3, 5), (0, 4)))
        for shape in self._shapes():
            check = partial(check_step, self.place, attention, self.place.half, rows, shape)
            self.report.check(f"a mixed step, {shape}", check, needs_s=3)
        self.report.check(
            "decode steps, recorded, and by our own kernels", partial(self._check_steps, with_package), needs_s=5
        )
        if not self.place.dry:
            for case in TIMED:
                self.report.check(f"time of {case}", partial(self._time, case, with_package), needs_s=3)

    def _shapes(self) -> tuple[Shape, ...]:
        """With kernels that were built ahead: bf16, heads of 64 and 128, neither windows nor caps."""
        plain = AttentionVariant(0.125)
        many = (Shape(32, 8, 128, 16, plain), Shape(16, 8, 128, 16, plain), Shape(9, 3, 64, 1, plain))
        return self.place.pick(many, (Shape(4, 2, 64, 4, plain),))

    def _fake(self) -> FlashInfer:
        return FlashInfer("fake", fake.BatchPrefillWithPagedKVCacheWrapper, fake.BatchDecodeWithPagedKVCacheWrapper)

    def _check_steps(self, load: Callable[[tuple[int, int]], FlashInfer]) -> Found:
        """Logits of decode steps by its kernels, recorded and as they come, and by our own, over one pool's numbers."""
        sizes, end = self.place.pick((1, 8, 64), (1, 2)), self.place.pick(300, 5)
        config = {**CONFIGS[self.place.pick("qwen3-0.6b", "tiny")], "head_dim": self.place.pick(128, 64)}
        stands = {
            name: Stand(
                config,
                self.device,
                self.place.half,
                pages=max(sizes) * (-(-end // PAGE_TOKENS) + 1),
                context_tokens=end + PAGE_TOKENS,
                layers=self.place.pick(6, 1),
                attention=name,
                load=load,
            )
            for name in ("flashinfer", "triton")
        }
        stands["flashinfer"].fill_pool()
        found: dict[str, float] = {}
        with torch.inference_mode():
            copy_pool(stands["flashinfer"], stands["triton"])
            graphs = stands["flashinfer"].graphs(sizes, tell=lambda line: None)
            graphs.warm_up()
            equal(set(graphs.recorded), set(sizes), "sizes that were recorded")
            for count in sizes:
                rows = stands["triton"].rows(count, end - 1, 1)
                tokens, positions = stands["triton"].inputs(rows)
                plain, ours = (stands[name].forward(rows, tokens, positions) for name in ("flashinfer", "triton"))
                recorded = graphs.logits(tokens, positions, rows.page_tables, rows.starts)
                assert recorded is not None
                for name, got in (("recorded", recorded), ("triton", ours)):
                    found[f"{name} {count}"] = compare(got, plain, rms=TOLERANCE, most=20 * TOLERANCE)["rms"]
            graphs.close()
        return found

    def _time(self, case: AttentionShape, load: Callable[[tuple[int, int]], FlashInfer]) -> Found:
        """Our kernels, FlashInfer's, and the share of its rate that ours have."""
        pool, rows = paged_rows(case, self.place.device, torch.bfloat16)
        variants, clock = (AttentionVariant(case.dim**-0.5),), GpuClock(self.place.device)
        tokens = case.rows * case.length
        q = torch.randn(tokens, case.heads, case.dim, dtype=torch.bfloat16, device=self.place.device)
        k, v = (torch.randn(tokens, case.kv_heads, case.dim, dtype=q.dtype, device=q.device) for _ in range(2))
        ms = {}
        with torch.inference_mode():
            for name in ("triton", "flashinfer"):
                begun = gpu_attention(name, self.device, pool, variants, case.heads, load).begin(rows)
                ms[name] = round(clock.median_ms(lambda begun=begun: begun.attend(0, q, k, v)), 4)
        return {
            "triton_ms": ms["triton"],
            "flashinfer_ms": ms["flashinfer"],
            "triton_of_flashinfer": round(ms["flashinfer"] / ms["triton"], 3),
        }


TIMED = (
    AttentionShape(1, 8191, 1),
    AttentionShape(1, 65535, 1),
    AttentionShape(64, 4095, 1),
    AttentionShape(64, 4095, 1, heads=16),
    AttentionShape(256, 1023, 1),
    AttentionShape(1, 0, 4096),
    AttentionShape(1, 6144, 2048),
    AttentionShape(16, 0, 512),
)


def copy_pool(source: Stand, into: Stand) -> None:
    for layer in range(source.spec.num_layers):
        for page, other in zip(source.pool.layer(layer), into.pool.layer(layer), strict=True):
            other.copy_(page)
