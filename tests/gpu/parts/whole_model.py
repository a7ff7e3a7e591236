"""Logits of a model on the device against those of the torch reference in fp32 on the CPU, from the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from fakes.forward import logits_of
from load.bench.gpu_models import CONFIGS, spec_of
from load.bench.gpu_stand import gpu_attention
from minisgl_backend.device.device import open_device
from minisgl_backend.kernels.gpu.kernels import TritonKernels
from minisgl_backend.models.checkpoint import RandomTensors
from minisgl_backend.models.load import build_decoder
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.tensors import expected_tensors
from tests.gpu.checks import Found, Place, Report, compare, equal

# Of logits whose root mean square is about 1. fp32 differs by the order of sums only; in 16 bits every activation is
# rounded, some layers deep, and the largest of millions of errors lies far beyond their root mean square.
TOLERANCES = {
    torch.float32: {"rms": 2e-4, "most": 5e-3},
    torch.float16: {"rms": 1e-2, "most": 1e-1},
    torch.bfloat16: {"rms": 5e-2, "most": 4e-1},
}
CHOICES = {"rms": 0.3, "most": 20.0}
"""In 16 bits where there are experts: a rounding sends a token to another one. fp32 shows what is wrong."""

CUTS = {"prompt": [96], "chunks and decode": [40, 1, 30, 23, 1, 1]}
SMALL_CUTS = {"prompt": [12], "chunks and decode": [5, 1, 4, 1, 1]}


class Weights:
    """A TensorSource whose tensors are made once."""

    def __init__(self, spec: ModelSpec) -> None:
        self._source = RandomTensors(expected_tensors(spec), 0, torch.bfloat16)
        self._made: dict[str, Tensor] = {}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._source.shapes()

    def read(self, name: str) -> Tensor:
        if name not in self._made:
            self._made[name] = self._source.read(name)
        return self._made[name]


def run(report: Report, place: Place) -> None:
    for name, layers in place.pick((("qwen3-0.6b", 8), ("tiny-moe", 2)), (("tiny", 2), ("tiny-moe", 1))):
        _Case(name, layers, place, report).run()
    if not place.dry:
        report.check("the memory meter", partial(_check_meter, place))


class _Case:
    def __init__(self, name: str, layers: int, place: Place, report: Report) -> None:
        self.name, self.place, self.report = name, place, report
        self.spec = spec_of(CONFIGS[name], layers)
        self.weights = Weights(self.spec)
        self.cuts = place.pick(CUTS, SMALL_CUTS)
        length = sum(self.cuts["prompt"])
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, self.spec.vocab_size, (length,), generator=generator).tolist()

    def run(self) -> None:
        reference: list[Tensor] = []

        def make() -> Found:
            model = build_decoder(self.spec, self.weights, torch.device("cpu"), torch.float32, 256)
            reference.append(logits_of(model, self.tokens, [len(self.tokens)], 16, torch.float32))
            return {"scale": round(reference[0].square().mean().sqrt().item(), 3)}

        if self.report.check(f"{self.name}: the reference", make):
            for dtype in self.place.dtypes:
                for cut, lengths in self.cuts.items():
                    name = f"{self.name}: logits of {cut}, {str(dtype).removeprefix('torch.')}"
                    self.report.check(name, partial(self._check, dtype, lengths, reference[0]), needs_s=3)

    def _check(self, dtype: torch.dtype, lengths: list[int], reference: Tensor) -> Found:
        model = build_decoder(self.spec, self.weights, self.place.device, dtype, 256, kernels=TritonKernels())
        attention = partial(gpu_attention, "triton", open_device(self.place.device.type), heads=self.spec.num_heads)
        got = logits_of(model, self.tokens, lengths, 16, dtype, attention)
        choices = self.spec.moe is not None and dtype != torch.float32
        return compare(got, reference, **(CHOICES if choices else TOLERANCES[dtype]))


def _check_meter(place: Place) -> Found:
    """What sizes the KV pool: the meter of a piece of work."""
    device, size = open_device("cuda"), 64 << 20

    def work() -> None:
        torch.empty(size, dtype=torch.uint8, device=place.device).zero_()

    equal(device.peak_memory_bytes(work), size, "the peak and what was taken")
    equal(0 < device.free_memory_bytes() < device.total_memory_bytes(), True, "memory")
    return None
