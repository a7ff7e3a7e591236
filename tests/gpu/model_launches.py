"""The steps whose launches are collected: models in the shapes that matter, over meta tensors, from token ids to logits
and to sampled tokens.

One layer of each kind is enough: all layers of a kind launch the same. Steps are prompts, chunks with decode rows, and
decode rows, these both as they are recorded and as they are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from load.bench.gpu_models import CONFIGS, build_model, spec_of, triton_attention
from minisgl_backend.attention.gpu_backend import GpuAttention
from minisgl_backend.attention.interface import StepRows
from minisgl_backend.config import Quantization
from minisgl_backend.kvpool.paged import KvShape, PagedKvPool
from minisgl_backend.models.model import Model
from minisgl_backend.worker.decode_graphs import graph_sizes
from minisgl_backend.worker.torch_runner import attention_variants
from tests.fakes.hub_configs import HUB_CONFIGS

from .launches import META, Collection
from .sampling_launches import draw

HALVES = (torch.bfloat16, torch.float16)
CONTEXT = 8192
PROMPTS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((0, 16),),
    ((0, 100), (0, 33)),
    ((0, 512),),
    ((0, 2048),),
    ((0, 4096),),
    ((4096, 2048),),
    ((7, 1), (500, 1), (64, 255), (5000, 40)),  # the last one deals its keys among programs
    ((0, 2000), *(((4000, 1),) * 48)),
)
"""(start, length) of each row."""


@dataclass(frozen=True)
class Shape:
    """A model as it is served."""

    name: str
    config: Mapping[str, Any]
    layers: int  # of the first ones: at least one of each kind
    dtypes: tuple[torch.dtype, ...]
    page_size: int = 16
    quantization: Quantization = "none"


def shapes(*, whole: bool) -> Iterator[Shape]:
    """whole: every dtype that a model is served in."""
    dtypes = HALVES if whole else HALVES[:1]
    for name in ("qwen3-0.6b", "llama-3-8b", "qwen3-30b-a3b"):
        yield Shape(name, CONFIGS[name], 1, dtypes)
    yield Shape("llama-3-8b int8", CONFIGS["llama-3-8b"], 1, dtypes, quantization="int8")
    yield Shape("gemma-2-2b", HUB_CONFIGS["gemma-2-2b"], 2, dtypes)  # windows, caps, gelu
    if whole:
        yield Shape("gpt-oss-20b", GPT_OSS, 2, dtypes)  # sinks, biases, clamped swiglu
        yield Shape("Phi-4-mini", HUB_CONFIGS["Phi-4-mini-instruct"], 1, dtypes)  # rotates a part of a head
        yield Shape("GLM-4-9B", HUB_CONFIGS["GLM-4-9B-0414"], 1, dtypes)  # interleaved
        yield Shape("tiny", CONFIGS["tiny"], 1, (torch.float32,), page_size=1)
        yield Shape("tiny-moe", CONFIGS["tiny-moe"], 1, (torch.float32,))


GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}
"""Over the family's own defaults, which are those of the published models."""


def collect_all(collection: Collection, *, whole: bool) -> None:
    """whole: every shape, every size of step; else a few."""
    for shape in shapes(whole=whole):
        for dtype in shape.dtypes:
            steps = _Steps.of(shape, dtype)
            for rows in PROMPTS if whole else PROMPTS[-2:]:
                collection.run(f"{shape.name} {dtype} {rows[:3]}", partial(steps.forward, rows))
            for size in graph_sizes(256) if whole else (1, 64):
                collection.run(f"{shape.name} {dtype} {size} decode rows", partial(steps.decode, size))


def collect_ahead(collection: Collection) -> None:
    """What the parts of the proof launch (tests/gpu/parts, load/bench/step_gpu.py): their models, steps like theirs."""
    fp32, bf16 = torch.float32, torch.bfloat16
    large = [Shape(name, CONFIGS[name], 1, (bf16,)) for name in ("qwen3-0.6b", "llama-3-8b", "qwen3-30b-a3b")]
    small = [Shape(name, CONFIGS[name], 1, (fp32, bf16)) for name in ("qwen3-0.6b", "tiny", "tiny-moe")]
    for shape in large + small:
        for dtype in shape.dtypes:
            steps = _Steps.of(shape, dtype)
            for rows in (((0, 512),), ((0, 4096),), ((0, 1024),) * 8, ((0, 448),) * 8, ((16, 16), (7, 1))):
                collection.run(f"{shape.name} {dtype} {rows[:3]}", partial(steps.forward, rows))
            for count in (1, 2, 4, 8, 12, 16, 64, 256):
                collection.run(f"{shape.name} {dtype} {count} decode rows", partial(steps.decode, count))


@dataclass(frozen=True)
class _Steps:
    """A model on meta, and its pool."""

    model: Model
    attention: GpuAttention
    page_size: int

    @classmethod
    def of(cls, shape: Shape, dtype: torch.dtype) -> _Steps:
        spec = spec_of(shape.config, shape.layers)
        pages = 2 * CONTEXT // shape.page_size
        pool = PagedKvPool(
            KvShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype), pages, shape.page_size, META
        )
        model = build_model(spec, META, dtype, CONTEXT, shape.quantization)
        return cls(model, triton_attention(pool, attention_variants(spec), spec.num_heads), shape.page_size)

    def forward(self, rows: Sequence[tuple[int, int]]) -> None:
        """A step as it is not recorded; the last token of each row gets logits."""
        starts, lengths = (np.array(column, np.int64) for column in zip(*rows, strict=True))
        tables = _longs(len(rows), -(-int((starts + lengths).max()) // self.page_size))
        tokens = int(lengths.sum())
        begun = self.attention.begin(StepRows(starts, lengths, tables))
        logits = self.model.forward(_longs(tokens), _longs(tokens), begun, _longs(len(rows)))
        draw(logits)

    def decode(self, rows: int) -> None:
        """As it is recorded, with the page tables of a whole context; and as it is not."""
        tables = _longs(rows, -(-CONTEXT // self.page_size))
        tokens, positions = _longs(rows), _longs(rows)
        step = self.attention.decode_step(positions, tables)
        step.refresh(np.zeros(rows, np.int64), tables)
        self.model.forward(tokens, positions, step.begin(), _longs(rows))
        self.forward([(CONTEXT // 2, 1)] * rows)


def _longs(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device=META)
