"""A model with its pool on one device, as a worker has it: what steps are measured and tested on, without files.

On a GPU all is the engine's own; where there is none, attention is by the Triton kernels all the same, interpreted, and
a recording does its work again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from load.bench.gpu_models import build_model, spec_of
from minisgl_backend.attention.gpu_backend import GpuAttention
from minisgl_backend.attention.interface import AttentionVariant, StepRows
from minisgl_backend.device.device import Device
from minisgl_backend.device.graph import Graph, Recorder
from minisgl_backend.kernels.gpu.flashinfer import FlashInfer, load_flashinfer
from minisgl_backend.kvpool.paged import KvShape, PagedKvPool
from minisgl_backend.models.model import Model
from minisgl_backend.sampling.grammar import GrammarSlots
from minisgl_backend.sampling.triton_draw import TritonDraw
from minisgl_backend.worker.attention_choice import choose_gpu_attention
from minisgl_backend.worker.decode_graphs import DecodeGraphs
from minisgl_backend.worker.torch_runner import TorchRunner, attention_variants

PAGE_TOKENS = 16


def gpu_attention(
    setting: str,
    device: Device,
    pool: PagedKvPool,
    variants: Sequence[AttentionVariant],
    heads: int,
    load: Callable[[tuple[int, int]], FlashInfer] = load_flashinfer,
) -> GpuAttention:
    """As a worker on a GPU chooses it. A CPU passes for an H200, for kernels that are interpreted. load: see
    choose_gpu_attention.
    """
    capability = device.capability if device.torch_device.type == "cuda" else (9, 0)
    chosen = choose_gpu_attention(setting, capability, device.streams, lambda line: None, load)
    built = chosen.build(pool, variants, heads)
    assert isinstance(built, GpuAttention), setting
    return built


class Stand:
    """Not for two threads at once."""

    def __init__(
        self,
        config: Mapping[str, Any],
        device: Device,
        dtype: torch.dtype,
        *,
        pages: int,
        context_tokens: int,
        layers: int = 0,
        attention: str = "triton",
        load: Callable[[tuple[int, int]], FlashInfer] = load_flashinfer,
    ) -> None:
        """config: see CONFIGS. layers: how many of the first ones; 0: all. attention, load: see gpu_attention."""
        self.spec = spec_of(config, layers)
        self.dtype, self.device, self.context_tokens = dtype, device, context_tokens
        to = device.torch_device
        self.model: Model = build_model(self.spec, to, dtype, context_tokens)
        shape = KvShape(self.spec.num_layers, self.spec.num_kv_heads, self.spec.head_dim, dtype)
        self.pool = PagedKvPool(shape, pages, PAGE_TOKENS, to)
        variants, heads = attention_variants(self.spec), self.spec.num_heads
        self.attention = gpu_attention(attention, device, self.pool, variants, heads, load)
        self.recorder: Recorder = device.recorder() or EmulatedRecorder()

    def fill_pool(self) -> None:
        """With random keys and values."""
        for layer in range(self.spec.num_layers):
            for store in self.pool.layer(layer):
                store.normal_()

    def rows(self, count: int, start: int, length: int) -> StepRows:
        """All alike; their pages lie in any order."""
        pages = -(-(start + length) // PAGE_TOKENS)
        order = torch.randperm(self.pool.num_pages, generator=torch.Generator().manual_seed(count))
        starts, lengths = (np.full(count, value, np.int64) for value in (start, length))
        tables = order[: count * pages].view(count, pages)
        return StepRows(starts, lengths, tables.to(self.device.torch_device))

    def inputs(self, rows: StepRows) -> tuple[Tensor, Tensor]:
        """Tokens, positions."""
        positions = np.concatenate([np.arange(s, s + n) for s, n in zip(rows.starts, rows.lengths, strict=True)])
        to = self.device.torch_device
        tokens = torch.arange(len(positions), device=to) * 7919 % self.spec.vocab_size
        return tokens, torch.from_numpy(positions).to(to)

    def forward(self, rows: StepRows, tokens: Tensor, positions: Tensor) -> Tensor:
        """A step as it is not recorded → logits of each row's last token."""
        last = torch.from_numpy(np.cumsum(rows.lengths) - 1).to(self.device.torch_device)
        return self.model.forward(tokens, positions, self.attention.begin(rows), last)

    def graphs(self, sizes: Sequence[int], tell: Callable[[str], None] = print) -> DecodeGraphs:
        """For decode steps of so many rows; nothing is recorded yet."""
        return DecodeGraphs(
            self.model,
            self.attention,
            self.recorder,
            sizes=sizes,
            at_start=sizes,
            table_pages=-(-self.context_tokens // PAGE_TOKENS),
            scratch_page=self.pool.scratch_page,
            device=self.device.torch_device,
            tell=tell,
        )

    def runner(self, graphs: DecodeGraphs | None, *, max_running: int, token_budget: int) -> TorchRunner:
        """Takes the model over, warmed up; of one stand one after the other may be made, and none is to be closed."""
        runner = TorchRunner(
            self.model,
            self.device,
            self.pool,
            attention=self.attention,
            graphs=graphs,
            max_running=max_running,
            context_tokens=self.context_tokens,
            token_budget=token_budget,
            grammars=GrammarSlots(tuple, self.spec.vocab_size),
            draw=TritonDraw,
        )
        runner.warm_up()
        return runner


class EmulatedRecorder:
    """See Recorder: a replay does the work again."""

    shares_memory = False
    held_bytes = 0

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        """See Recorder."""
        out = work()
        return _EmulatedGraph(work, out), out


@dataclass(frozen=True)
class _EmulatedGraph:
    work: Callable[[], Tensor]
    out: Tensor

    def replay(self) -> None:
        """See Graph."""
        self.out.copy_(self.work())

    def close(self) -> None:
        """See Graph."""
