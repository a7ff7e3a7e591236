"""What `kernels_gpu` measures: each case's inputs, the work, its reference, and the bytes and operations it needs.

Shapes are those of the models in gpu_models.py; on a CPU, where the kernels are interpreted, very small ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from load.bench.gpu_stand import gpu_attention
from minisgl_backend.attention.interface import AttentionVariant, StepRows
from minisgl_backend.attention.torch_backend import TorchAttention
from minisgl_backend.device.device import open_device
from minisgl_backend.kernels.gpu.heads import prepare_and_write
from minisgl_backend.kernels.gpu.int8 import int8_product_triton
from minisgl_backend.kernels.gpu.kernels import TritonKernels
from minisgl_backend.kernels.gpu.moe import mix_experts_triton
from minisgl_backend.kernels.gpu.penalties import change_rows
from minisgl_backend.kernels.gpu.sampling import sample_rows
from minisgl_backend.kernels.interface import HeadPreparation, Kernels, Rotation
from minisgl_backend.kernels.moe import ExpertActivation, ExpertWeights, mix_experts_reference
from minisgl_backend.kernels.paged_kv import write_kv
from minisgl_backend.kernels.torch_kernels import TORCH_KERNELS
from minisgl_backend.kvpool.paged import KvShape, PagedKvPool
from minisgl_backend.layers.quant.int8 import Int8Rows
from minisgl_backend.messages.sampling import GREEDY, Sampling, TokenRules
from minisgl_backend.sampling.device_columns import device_columns
from minisgl_backend.sampling.draw import change_logits
from minisgl_backend.sampling.masks import TokenMasks
from minisgl_backend.sampling.parameters import SamplingColumns
from minisgl_backend.sampling.row_changes import row_changes
from minisgl_backend.sampling.rules import RuleBook
from minisgl_backend.sampling.sampler import sample_tokens
from minisgl_backend.sampling.utf8 import pack_bits

_SILU = ExpertActivation("silu")


@dataclass(frozen=True)
class Case:
    """One kernel on one shape."""

    work: Callable[[], Tensor]
    reference: Callable[[], Tensor]  # the same in plain torch, once
    touched_bytes: float  # read or written once
    operations: float  # of products: two for each multiplication
    tolerance: float  # of the error's root mean square, relative
    peer: Callable[[], object] | None = None  # timed beside it
    peer_waits: bool = False  # for the device, so that no graph can hold it


@dataclass(frozen=True)
class Maker:
    """A case that is not made yet: each takes memory."""

    name: str
    make: Callable[[], Case]


def all_cases(device: torch.device, dtype: torch.dtype) -> Iterator[Maker]:
    """In the order in which they are measured."""
    cases = _Cases(device, dtype)
    small = device.type != "cuda"
    for rows in (3,) if small else (1, 64, 4096):
        size, inner = (64, 96) if small else (4096, 14336)
        yield Maker(f"add_rms_norm {rows} x {size}", partial(cases.add_rms_norm, rows, size))
        yield Maker(f"silu {rows} x {inner}", partial(cases.silu, rows, inner))
        heads = (4, 2, 16) if small else (32, 8, 128)
        yield Maker(f"rotary {rows} x {heads}", partial(cases.rotary, rows, *heads))
        yield Maker(f"rotary and write {rows} x {heads}", partial(cases.write, rows, *heads))
        outputs = 40 if small else 6144
        yield Maker(f"int8 {rows} x {outputs} x {size}", partial(cases.int8, rows, outputs, size))
        yield Maker(f"take_rows {rows} x {size}", partial(cases.take_rows, rows, size, 50 if small else 128256))
    for tokens in (5,) if small else (1, 8, 64, 4096):
        experts = (6, 2, 40, 24) if small else (128, 8, 2048, 768)
        yield Maker(f"experts {tokens} of {experts}", partial(cases.experts, tokens, *experts))
        yield Maker(f"router {tokens} of {experts[:3]}", partial(cases.route, tokens, *experts[:3]))
    for rows in (3,) if small else (1, 64, 256):
        vocab = 300 if small else 151936
        for name, sampling in _SAMPLINGS.items():
            yield Maker(f"draw {name} {rows} x {vocab}", partial(cases.draw, rows, vocab, sampling))
        said = 20 if small else 1000
        yield Maker(f"penalties, masks {rows} x {vocab}", partial(cases.changes, rows, vocab, said))
        yield Maker(f"softcap {rows} x {vocab}", partial(cases.softcap, rows, vocab))
    for shape in _SMALL_ATTENTION if small else _ATTENTION:
        yield Maker(f"attention {shape}", partial(cases.attention, shape))


_SAMPLINGS = {
    "greedy": GREEDY,
    "of all": Sampling(temperature=0.8, top_k=0, top_p=1.0, seed=1, sample_index=0),
    "top_k, top_p": Sampling(temperature=0.8, top_k=50, top_p=0.9, seed=1, sample_index=0),
    "flat top_p": Sampling(temperature=100.0, top_k=0, top_p=0.9, seed=1, sample_index=0),
}


@dataclass(frozen=True)
class AttentionShape:
    """Rows that are all alike."""

    rows: int
    start: int  # tokens that a row has already
    length: int  # that it computes
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128

    def __str__(self) -> str:
        what = "decode" if self.length == 1 else f"chunk {self.length}"
        return f"{what} {self.rows} x {self.start + self.length}, {self.heads}/{self.kv_heads} heads"

    @property
    def seen(self) -> int:
        """Keys that the queries of a row see, all together."""
        return self.length * self.start + self.length * (self.length + 1) // 2


_ATTENTION = (
    AttentionShape(1, 8191, 1),
    AttentionShape(1, 65535, 1),
    AttentionShape(8, 8191, 1),
    AttentionShape(64, 4095, 1),
    AttentionShape(256, 1023, 1),
    AttentionShape(64, 4095, 1, heads=16),
    AttentionShape(64, 4095, 1, kv_heads=4),
    AttentionShape(1, 0, 4096),
    AttentionShape(1, 6144, 2048),
    AttentionShape(16, 0, 512),
)
_SMALL_ATTENTION = (AttentionShape(2, 20, 1, 4, 2, 16), AttentionShape(1, 5, 9, 4, 2, 16))


@dataclass(frozen=True)
class _Cases:
    device: torch.device
    dtype: torch.dtype

    def normal(self, *shape: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(sum(shape))
        return torch.randn(shape, generator=generator, device=self.device).to(self.dtype)

    def add_rms_norm(self, rows: int, size: int) -> Case:
        x, y, weight = self.normal(rows, size), self.normal(rows, size).roll(1), self.normal(size)
        ours = TritonKernels()

        def both(kernels: object, x: Tensor, y: Tensor) -> Tensor:
            return torch.stack(kernels.add_rms_norm(x, y, weight, 1e-6))  # type: ignore[attr-defined]

        return Case(
            lambda: ours.add_rms_norm(x, y, weight, 1e-6)[1],
            lambda: both(TORCH_KERNELS, x, y)[1],
            4 * x.nbytes,
            0,
            _rounding(self.dtype),
            lambda: F.rms_norm(x + y, (size,), weight, 1e-6),
        )

    def silu(self, rows: int, size: int) -> Case:
        both = self.normal(rows, 2 * size)
        gate, up = both.chunk(2, dim=-1)
        gated = TritonKernels().gated("silu")
        return Case(
            lambda: gated(gate, up),
            lambda: F.silu(gate.float()) * up.float(),
            1.5 * both.nbytes,
            0,
            _rounding(self.dtype),
            lambda: F.silu(gate) * up,
        )

    def rotary(self, tokens: int, heads: int, kv_heads: int, dim: int) -> Case:
        """With the norms of heads."""
        qkv = self.normal(tokens, heads + 2 * kv_heads, dim)
        q, k = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
        angles = self.normal(tokens, 1, dim // 2).float()
        rotation, norm = Rotation(angles.cos(), angles.sin()), self.normal(dim)
        ours = HeadPreparation(TritonKernels(), rotation, norm, norm, 1e-6)
        theirs = HeadPreparation(TORCH_KERNELS, rotation, norm.float(), norm.float(), 1e-6)
        return Case(
            lambda: ours(q, k)[0],
            lambda: theirs(q.float(), k.float())[0],
            2 * (q.nbytes + k.nbytes) + 2 * angles.nbytes,
            0,
            2 * _rounding(self.dtype),
        )

    def write(self, tokens: int, heads: int, kv_heads: int, dim: int) -> Case:
        """Norms of heads, rotation, keys and values into pages of 16 tokens. What is compared are the pages of keys."""
        qkv, end = self.normal(tokens, heads + 2 * kv_heads, dim), heads + kv_heads
        q, k, v = qkv[:, :heads], qkv[:, heads:end], qkv[:, end:]
        angles = self.normal(tokens, 1, dim // 2).float()
        rotation, norm = Rotation(angles.cos(), angles.sin()), self.normal(dim)
        ours = HeadPreparation(TritonKernels(), rotation, norm, norm, 1e-6)
        theirs = HeadPreparation(TORCH_KERNELS, rotation, norm.float(), norm.float(), 1e-6)
        pages = tokens // 16 + 1
        places = torch.randperm(pages * 16, generator=torch.Generator().manual_seed(tokens))[:tokens].to(self.device)
        k_pages, v_pages = (qkv.new_zeros(pages, 16, kv_heads, dim) for _ in range(2))

        def work() -> Tensor:
            prepare_and_write(q, k, v, ours, k_pages, v_pages, places)
            return k_pages

        def reference() -> Tensor:
            keys, values = (torch.zeros(k_pages.shape, device=self.device) for _ in range(2))
            write_kv(keys, values, theirs(q.float(), k.float())[1], v.float(), places)
            return keys

        return Case(work, reference, 2 * qkv.nbytes + 2 * angles.nbytes, 0, 2 * _rounding(self.dtype))

    def softcap(self, rows: int, vocab: int) -> Case:
        x = self.normal(rows, vocab) * 30
        kernels = TritonKernels()
        return Case(
            lambda: kernels.softcap(x, 30.0),
            lambda: TORCH_KERNELS.softcap(x.float(), 30.0),
            2 * x.nbytes,
            0,
            2 * _rounding(self.dtype),
            lambda: TORCH_KERNELS.softcap(x, 30.0),
        )

    def int8(self, tokens: int, outputs: int, depth: int) -> Case:
        x, rows = self.normal(tokens, depth), Int8Rows.quantise(self.normal(outputs, depth) * depth**-0.5)
        weight = rows.dense(slice(None), self.dtype)
        return Case(
            lambda: int8_product_triton(x, rows.values, rows.scales, None),
            lambda: F.linear(x.float(), rows.dense(slice(None), torch.float32)),
            rows.values.nbytes + x.nbytes + tokens * outputs * self.dtype.itemsize,
            2.0 * tokens * outputs * depth,
            2 * _rounding(self.dtype),
            lambda: F.linear(x, weight),
        )

    def route(self, tokens: int, num_experts: int, top_k: int, hidden: int) -> Case:
        """A router's logits and its choice. What is compared are the weights of the chosen."""
        x, weight = self.normal(tokens, hidden), self.normal(num_experts, hidden).double() * hidden**-0.5
        ours = TritonKernels()

        def work(kernels: Kernels) -> Tensor:
            return kernels.choose_experts(kernels.router_logits(x, weight, None), top_k, renormalise=True).weights

        return Case(
            lambda: work(ours),
            lambda: work(TORCH_KERNELS),
            weight.nbytes + x.nbytes + 12 * tokens * top_k,
            2.0 * tokens * num_experts * hidden,
            1e-5,
            lambda: work(TORCH_KERNELS),
        )

    def take_rows(self, count: int, size: int, rows: int) -> Case:
        table = self.normal(rows, size)
        index = torch.arange(count, device=self.device) * 7919 % rows
        kernels = TritonKernels()
        return Case(
            lambda: kernels.take_rows(table, index),
            lambda: table[index],
            2 * count * size * self.dtype.itemsize,
            0,
            0.0,
            lambda: table[index],
        )

    def draw(self, rows: int, vocab: int, sampling: Sampling) -> Case:
        """Compared by the logits of what was drawn: a token in some thousands may differ by the rounding of one exp."""
        logits, parameters, positions = self.normal(rows, vocab) * 3, SamplingColumns.greedy(rows), np.arange(rows)
        for row in range(rows):
            parameters.put(row, sampling)
        columns = device_columns(parameters, positions, self._upload)

        def drawn(tokens: Tensor) -> Tensor:
            return logits.gather(1, tokens[:, None]).float()

        return Case(
            lambda: drawn(sample_rows(logits, columns)),
            lambda: drawn(sample_tokens(logits, parameters, positions)),
            rows * vocab * self.dtype.itemsize,
            0,
            0.0 if sampling is GREEDY else 0.05,
            lambda: sample_tokens(logits, parameters, positions),
            peer_waits=True,
        )

    def changes(self, rows: int, vocab: int, said: int) -> Case:
        """Penalties of rows that have said so many tokens, and a mask for each.

        Bytes: a copy's, the same in place, and once more, so that what is masked can be compared.
        """
        logits, every = (self.normal(rows, vocab) * 3).float(), np.arange(rows)
        chance = np.random.default_rng(rows)
        tokens = torch.from_numpy(chance.integers(0, vocab, (rows, said), dtype=np.int32)).to(self.device)
        book = RuleBook(tokens, np.full(rows, said // 2), vocab)
        for row in range(rows):
            book.put(row, TokenRules(presence_penalty=0.5, frequency_penalty=0.2, repetition_penalty=1.2))
        rules = book.of(every, np.full(rows, said))
        masks = TokenMasks(every, torch.from_numpy(pack_bits(chance.random((rows, vocab)) < 0.5)))
        changes = row_changes(rules, masks, every, self._upload)

        def work() -> Tensor:
            own = logits.clone()
            change_rows(own, changes)
            return own.nan_to_num_(neginf=0.0)

        return Case(
            work,
            lambda: change_logits(logits.clone(), every, rules, masks).nan_to_num_(neginf=0.0),
            6 * logits.nbytes,
            0,
            1e-6,
        )

    def _upload(self, arrays: Sequence[npt.NDArray[Any]]) -> list[Tensor]:
        return [torch.from_numpy(array).to(self.device) for array in arrays]

    def experts(self, tokens: int, num_experts: int, top_k: int, hidden: int, inner: int) -> Case:
        """The choices are spread evenly; bytes: the weights of the experts that are chosen."""
        kernels = TritonKernels()
        weights = ExpertWeights(
            self.normal(num_experts, 2 * inner, hidden).mul_(hidden**-0.5),
            self.normal(num_experts, hidden, inner).mul_(inner**-0.5),
        )
        x = self.normal(tokens, hidden)
        logits = self.normal(tokens, num_experts).float()
        routing = kernels.choose_experts(logits, top_k, renormalise=True)
        used = int(torch.bincount(routing.experts.flatten(), minlength=num_experts).count_nonzero())
        weight_bytes = (weights.gate_up.nbytes + weights.down.nbytes) * used / num_experts
        return Case(
            lambda: mix_experts_triton(x, routing, weights, _SILU),
            lambda: mix_experts_reference(x, routing, weights, _SILU),
            weight_bytes + 2 * x.nbytes,
            6.0 * tokens * top_k * hidden * inner,
            3 * _rounding(self.dtype),
        )

    def attention(self, shape: AttentionShape) -> Case:
        """Pages of 16 tokens in any order. Bytes: keys and values, queries and outputs."""
        pool, rows = paged_rows(shape, self.device, self.dtype)
        variants = (AttentionVariant(shape.dim**-0.5),)
        tokens = shape.rows * shape.length
        q = self.normal(tokens, shape.heads, shape.dim)
        k, v = (self.normal(tokens, shape.kv_heads, shape.dim).roll(n) for n in (1, 2))
        begun = gpu_attention("triton", open_device("auto"), pool, variants, shape.heads).begin(rows)
        return Case(
            lambda: begun.attend(0, q, k, v),
            lambda: TorchAttention(pool, variants).begin(rows).attend(0, q, k, v),
            2.0 * shape.rows * (shape.start + shape.length) * shape.kv_heads * shape.dim * self.dtype.itemsize
            + 2 * q.nbytes,
            4.0 * shape.rows * shape.seen * shape.heads * shape.dim,
            2 * _rounding(self.dtype),
        )


def paged_rows(shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> tuple[PagedKvPool, StepRows]:
    """A full pool of one layer, and rows whose pages lie in any order."""
    page_size = 16
    pages = -(-(shape.start + shape.length) // page_size)
    pool = PagedKvPool(KvShape(1, shape.kv_heads, shape.dim, dtype), shape.rows * pages, page_size, device)
    for store in pool.layer(0):
        store.normal_()
    order = torch.randperm(shape.rows * pages, generator=torch.Generator().manual_seed(1))
    starts, lengths = (np.full(shape.rows, value, np.int64) for value in (shape.start, shape.length))
    return pool, StepRows(starts, lengths, order.view(shape.rows, pages).to(device))


def _rounding(dtype: torch.dtype) -> float:
    return {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
