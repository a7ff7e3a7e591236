"""How long work takes on a GPU, and what the GPU gives at most.

Work is captured in a CUDA graph and replayed, so that no launch by Python stands between the events; before each round
a buffer larger than the last cache is written. Where there is no GPU the same calls time a CPU by the wall clock: to
run dry, not to measure.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_FLUSH_BYTES = 256 << 20  # an H200's last cache holds 60 MB
_GIB = 1 << 30


class GpuClock:
    """Of one device."""

    def __init__(self, device: torch.device, rounds: int = 20) -> None:
        self.device = device
        self.rounds = rounds if self.on_gpu else 1
        self._flush = torch.empty(_FLUSH_BYTES if self.on_gpu else 1, dtype=torch.uint8, device=device)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def median_ms(self, work: Callable[[], object], *, captured: bool = True) -> float:
        """Of the rounds, after a warm-up. captured: work launches on the device alone and can be recorded."""
        if not self.on_gpu:
            began = time.perf_counter()
            work()
            return (time.perf_counter() - began) * 1e3
        run = self._capture(work) if captured else work
        run()
        times = []
        for _ in range(self.rounds):
            self._flush.zero_()
            times.append(self._between_events(run))
        torch.cuda.synchronize(self.device)
        return float(statistics.median(begin.elapsed_time(end) for begin, end in times))

    def _between_events(self, run: Callable[[], object]) -> tuple[Any, Any]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        return begin, end

    def _capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """The warm-up on a stream of its own, as captures ask for."""
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(2):
                work()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        replay: Callable[[], object] = graph.replay
        return replay

    def copy_bytes_per_s(self) -> float:
        """Bytes read and bytes written by a copy: the ceiling of what touches memory."""
        size = 2 * _GIB if self.on_gpu else 1 << 20
        source = torch.zeros(size, dtype=torch.uint8, device=self.device)
        into = torch.empty_like(source)
        return 2e3 * size / self.median_ms(lambda: into.copy_(source))

    def operations_per_s(self, dtype: torch.dtype) -> float:
        """Of a product of square matrices of random numbers: two for each multiplication."""
        side = 8192 if self.on_gpu else 64
        left, right = (torch.randn(side, side, device=self.device).to(dtype) for _ in range(2))
        out = torch.empty_like(left)
        return 2e3 * side**3 / self.median_ms(lambda: torch.mm(left, right, out=out))


def errors(got: Tensor, expected: Tensor) -> tuple[float, float]:
    """→ (root mean square, largest) of the difference, in units of the root mean square of what is expected."""
    wide, right = got.double(), expected.double()
    scale = right.square().mean().sqrt().clamp(min=1e-30)
    error = (wide - right) / scale
    return error.square().mean().sqrt().item(), error.abs().max().item()
