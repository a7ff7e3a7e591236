"""What lies between the products: norms, activations, rotation, rows of tables, against torch's kernels in fp32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minisgl_backend.kernels.gpu.heads import prepare_and_write
from minisgl_backend.kernels.gpu.kernels import TritonKernels
from minisgl_backend.kernels.interface import HeadPreparation, Kernels, Rotation
from minisgl_backend.kernels.torch_kernels import TORCH_KERNELS
from tests.gpu.checks import ROUNDING, Found, Place, Report, compare, equal


def run(report: Report, place: Place) -> None:
    kernels = TritonKernels()
    for dtype in place.dtypes:
        for rows, size in place.pick([(1, 1024), (7, 2048), (300, 4096), (1000, 14336)], [(1, 40), (5, 96)]):
            for name, work in _cases(rows, size, dtype):
                check = _Check(work, kernels, place, 3 * ROUNDING[dtype])
                report.check(f"{name} {rows} x {size} {_short(dtype)}", check)
        for tokens in place.pick((1, 33, 2000), (3,)):
            for heads in _HeadCase.all(place, tokens, dtype):
                report.check(f"{heads}", heads.check)


Work = Callable[[Kernels, Callable[[Tensor], Tensor]], Tensor]
"""(kernels, what takes a tensor to their device) → the result."""


class _Check:
    """The same work by both: torch's kernels on the CPU in fp32, ours where they run, on the same numbers."""

    def __init__(self, work: Work, kernels: Kernels, place: Place, tolerance: float) -> None:
        self.work, self.kernels, self.place, self.tolerance = work, kernels, place, tolerance

    def __call__(self) -> Found:
        expected = self.work(TORCH_KERNELS, lambda x: x.float() if x.is_floating_point() else x)
        got = self.work(self.kernels, lambda x: x.to(self.place.device))
        return compare(got, expected, rms=self.tolerance, most=8 * self.tolerance)


def _cases(rows: int, size: int, dtype: torch.dtype) -> list[tuple[str, Work]]:
    generator = torch.Generator().manual_seed(rows * size)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    x, y, weight = normal(rows, size), normal(rows, size), normal(size)
    both, table = normal(rows, 2 * size), normal(90, size)
    index = torch.randint(0, 90, (rows,), generator=generator)
    gate, up = both[:, :size], both[:, size:]
    return [
        ("rms_norm", lambda k, to: k.rms_norm(to(x), to(weight), 1e-6)),
        ("add_rms_norm", lambda k, to: torch.stack(k.add_rms_norm(to(x), to(y), to(weight), 1e-6))),
        ("add", lambda k, to: k.add(to(x), to(y))),
        ("silu", lambda k, to: k.gated("silu")(*_split(to(both), size))),
        ("gelu_tanh", lambda k, to: k.gated("gelu_tanh")(*_split(to(both), size))),
        ("take_rows", lambda k, to: k.take_rows(to(table), to(index))),
        ("softcap", lambda k, to: k.softcap(to(x), 3.0)),
        ("rows with gaps", lambda k, to: k.gated("silu")(to(gate), to(up))),
    ]


def _split(both: Tensor, size: int) -> tuple[Tensor, Tensor]:
    return both[:, :size], both[:, size:]


class _HeadCase:
    """Norms of heads, rotation and the write of keys and values in one launch."""

    def __init__(
        self, place: Place, tokens: int, dtype: torch.dtype, rotary_dim: int, *, norms: bool, interleaved: bool
    ) -> None:
        self.place, self.tokens, self.dtype = place, tokens, dtype
        self.rotary_dim, self.norms, self.interleaved = rotary_dim, norms, interleaved
        self.heads, self.kv_heads, self.dim = place.pick((32, 8, 128), (4, 2, 16))

    @classmethod
    def all(cls, place: Place, tokens: int, dtype: torch.dtype) -> list[_HeadCase]:
        dim = place.pick(128, 16)
        return [
            cls(place, tokens, dtype, dim, norms=False, interleaved=False),
            cls(place, tokens, dtype, dim, norms=True, interleaved=False),
            cls(place, tokens, dtype, dim // 2, norms=False, interleaved=True),
        ]

    def __str__(self) -> str:
        kind = f"{'norms and ' if self.norms else ''}rotation of {self.rotary_dim}{' interleaved' * self.interleaved}"
        return f"heads of {self.tokens} tokens, {kind}, {_short(self.dtype)}"

    def check(self) -> Found:
        generator = torch.Generator().manual_seed(self.tokens)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        width = (self.heads + 2 * self.kv_heads) * self.dim
        qkv = normal(self.tokens, width)
        norms = (normal(self.dim), normal(self.dim)) if self.norms else (None, None)
        angles = torch.rand(self.tokens, 1, self.rotary_dim // 2, generator=generator) * 6.28
        page_size, pages = 16, self.tokens // 16 + 2
        places = torch.randperm(pages * page_size, generator=generator)[: self.tokens]

        def prepare(kernels: Kernels, to: Callable[[Tensor], Tensor]) -> HeadPreparation:
            rotation = Rotation(to(angles.cos()), to(angles.sin()), self.interleaved)
            q_norm, k_norm = (None if norm is None else to(norm) for norm in norms)
            return HeadPreparation(kernels, rotation, q_norm, k_norm, 1e-6)

        def heads(flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            parts = flat.view(self.tokens, -1, self.dim)
            return parts.split((self.heads, self.kv_heads, self.kv_heads), 1)

        def widen(x: Tensor) -> Tensor:
            return x.float()

        def move(x: Tensor) -> Tensor:
            return x.to(self.place.device)

        q, k, v = heads(widen(qkv))
        expected_q, expected_k = prepare(TORCH_KERNELS, widen)(q, k)
        stores = [torch.full((pages, page_size, self.kv_heads, self.dim), 7.0, dtype=self.dtype) for _ in range(2)]
        k_pages, v_pages = (move(store) for store in stores)
        got_q = prepare_and_write(*heads(move(qkv)), prepare(TritonKernels(), move), k_pages, v_pages, move(places))
        tolerance = 4 * ROUNDING[self.dtype]
        found = compare(got_q, expected_q, rms=tolerance, most=10 * tolerance)
        written_k, written_v = (pages.cpu().view(-1, self.kv_heads, self.dim) for pages in (k_pages, v_pages))
        compare(written_k[places], expected_k, rms=tolerance, most=10 * tolerance)
        equal(torch.equal(written_v[places].float(), v), True, "values in their pages")
        untouched = torch.ones(len(written_k), dtype=torch.bool)
        untouched[places] = False
        equal(bool((written_k[untouched] == 7).all() and (written_v[untouched] == 7).all()), True, "other places")
        return found


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
