"""A model's folder → the decoder with its weights on a device.

Where it stands in the flow: called once by the worker. Names and shapes are checked before anything is read.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from minisgl_backend.config import Quantization
from minisgl_backend.distributed.group import RankGroup
from minisgl_backend.kernels.interface import Kernels
from minisgl_backend.kernels.native.packed import PACKED_DTYPES
from minisgl_backend.kernels.torch_kernels import TORCH_KERNELS
from minisgl_backend.layers.attention import QkNorms, SelfAttention
from minisgl_backend.layers.embedding import Embedding, EmbeddingOp
from minisgl_backend.layers.linear import LinearOp, PackedProduct
from minisgl_backend.layers.mlp import GatedMlp, Mlp
from minisgl_backend.layers.norm import RmsNorm
from minisgl_backend.layers.parallel import AllHeadsNorm, JoinedHead, SummedEmbedding, SummedLinear, SummedMlp
from minisgl_backend.layers.rotary import RotaryTable, build_rotary_table
from minisgl_backend.models.checkpoint import Checkpoint, TensorSource, check_tensors
from minisgl_backend.models.decoder import Block, Decoder, DecoderLayer
from minisgl_backend.models.experts import build_sparse_mlp
from minisgl_backend.models.files import is_gguf
from minisgl_backend.models.gguf_tensors import GgufTensors
from minisgl_backend.models.packed_file import PackedInMemory, PackedStore, open_packed, packed_path
from minisgl_backend.models.quantization import check_quantization
from minisgl_backend.models.ranks import Share, check_ranks, share_of
from minisgl_backend.models.registry import FAMILIES
from minisgl_backend.models.rope import RopeSpec
from minisgl_backend.models.sharding import SharedTensors
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.tensors import expected_tensors, unused_tensors
from minisgl_backend.models.weight_files import weight_files
from minisgl_backend.models.weight_names import WeightNames
from minisgl_backend.models.weights import NativeProducts, Weights

_LEAST_KEPT_BYTES = 32 << 20  # of a model's files


@dataclass(frozen=True, slots=True)
class Packing:
    """Dense products over packed weights, for the CPU."""

    product: PackedProduct  # `linear` of a native library
    cache: Path  # the folder where packed weights are kept
    progress: Callable[[str], None]  # gets a line where weights are packed


@dataclass(frozen=True, slots=True)
class LoadKernels:
    """What a model is built to compute with."""

    layers: Kernels = TORCH_KERNELS
    packing: Packing | None = None  # None: dense products are torch's


WITH_TORCH = LoadKernels()


def load_model(
    spec: ModelSpec,
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    context_tokens: int,
    quantization: Quantization = "none",
    kernels: LoadKernels = WITH_TORCH,
    group: RankGroup | None = None,
) -> Decoder:
    """Maps the weights of a folder or GGUF file and builds the model on the device, or this rank's part of it.

    Raises ModelUnsupported, and ConfigError for a model that can not be dealt out to so many ranks.
    """
    source, packing = open_source(spec, path), kernels.packing
    if packing is None:
        return build_decoder(spec, source, device, dtype, context_tokens, quantization, kernels.layers, group=group)
    as_stored = quantization == "gguf" and isinstance(source, GgufTensors) and source.quantised
    if by_torch := _left_to_torch(spec, dtype, quantised=as_stored or quantization in ("int8", "int4")):
        packing.progress(f"{by_torch} are multiplied by torch, so decode steps are not recorded")
    part = "" if group is None else f"{group.rank}/{group.ranks}"
    with _packed_store(packing, path, dtype, quantization, part) as store:
        # What is packed is read from a source of its own: the pages that it has mapped are let go of with it.
        native = NativeProducts(packing.product, store, open_source(spec, path))
        return build_decoder(spec, source, device, dtype, context_tokens, quantization, kernels.layers, native, group)


def _left_to_torch(spec: ModelSpec, dtype: torch.dtype, *, quantised: bool) -> str:
    """What of a model has no native products, for the operator; empty: nothing that a decode step would notice."""
    parts = [f"{str(dtype).removeprefix('torch.')} weights"] if dtype not in PACKED_DTYPES else []
    parts += ["quantised weights"] if quantised else []
    parts += ["experts"] if spec.moe is not None else []
    return " and ".join(parts)


def _packed_store(
    packing: Packing, path: Path, dtype: torch.dtype, quantization: Quantization, part: str
) -> AbstractContextManager[PackedStore]:
    """A small model is packed in less time than a file is worth, and tests make thousands of them."""
    if sum(file.stat().st_size for file in weight_files(path)) < _LEAST_KEPT_BYTES:
        return nullcontext(PackedInMemory())
    return open_packed(packed_path(packing.cache, path, dtype, quantization, part), packing.progress)


def open_source(spec: ModelSpec, path: Path) -> TensorSource:
    """The tensors of a folder or GGUF file, by the names of the spec's family. Raises ModelUnsupported."""
    return GgufTensors(path, spec) if is_gguf(path) else Checkpoint(path)


def build_decoder(
    spec: ModelSpec,
    source: TensorSource,
    device: torch.device,
    dtype: torch.dtype,
    context_tokens: int,
    quantization: Quantization = "none",
    kernels: Kernels = TORCH_KERNELS,
    native: NativeProducts | None = None,
    group: RankGroup | None = None,
) -> Decoder:
    """Checks every tensor's name and shape, then reads them one by one; see Weights.

    group: the ranks among which the model is dealt out; None: this one has all of it.
    context_tokens: the engine's context limit, up to which the rotary tables go; see rope.py for what else it decides.
    Raises ModelUnsupported.
    """
    check_tensors(expected_tensors(spec), source.shapes(), unused_tensors(spec))
    check_quantization(quantization, spec, gguf=isinstance(source, GgufTensors))
    names = FAMILIES[spec.architecture].names
    if group is None:
        weights = Weights(source, device, dtype, quantization, kernels, native)
        return _Builder(spec, names, weights, spec).decoder(context_tokens)
    check_ranks(spec, group.ranks, quantization)
    share = Share(group.rank, group.ranks)
    if native is not None:
        native = replace(native, source=SharedTensors(native.source, spec, names, share))
    weights = Weights(SharedTensors(source, spec, names, share), device, dtype, quantization, kernels, native)
    return _Builder(share_of(spec, share), names, weights, spec, group).decoder(context_tokens)


@dataclass(frozen=True, slots=True)
class _Builder:
    spec: ModelSpec  # of this rank's part
    names: WeightNames
    weights: Weights
    whole: ModelSpec
    group: RankGroup | None = None  # None: the part is all of it

    def decoder(self, context_tokens: int) -> Decoder:
        spec, names, device, kernels = self.spec, self.names, self.weights.device, self.weights.kernels
        tied = spec.tie_embeddings
        embedding: EmbeddingOp
        embedding, tied_head = self.weights.embedding(names.embedding, self._embedding_scale(), tied=tied)
        head: LinearOp = tied_head or self.weights.head(names.head)
        if self.group is not None:
            group, vocab_size = self.group, self.whole.vocab_size
            assert isinstance(embedding, Embedding), "a quantised table is not dealt out (check_ranks)"
            first, end = Share(group.rank, group.ranks).of_vocabulary(vocab_size)
            embedding, head = SummedEmbedding(embedding, first, end - first, group), JoinedHead(head, vocab_size, group)
            spec = replace(spec, vocab_size=vocab_size)
        return Decoder(
            spec=spec,
            embedding=embedding,
            rotaries=tuple(rotary_table(rope, context_tokens, device, kernels) for rope in spec.ropes),
            layers=tuple(self._layer(index) for index in range(spec.num_layers)),
            norm=self._norm(names.final_norm),
            lm_head=head,
            kernels=kernels,
        )

    def _embedding_scale(self) -> float:
        """Rounded as the families round theirs: to the model's dtype."""
        return torch.tensor(self.spec.embedding_scale, dtype=self.weights.dtype).item()

    def _layer(self, index: int) -> DecoderLayer:
        names, at = self.names, self.names.layer.format(layer=index)
        layer = self.spec.layers[index]
        return DecoderLayer(
            layer.rope,
            self._block(at, names.attention_in_norm, names.attention_out_norm),
            self._attention(index, at),
            self._block(at, names.mlp_in_norm, names.mlp_out_norm),
            self._summed_mlp(self._sparse_mlp(at) if layer.sparse else self._mlp(at)),
        )

    def _block(self, at: str, before: str, after: str) -> Block:
        norms = (self._norm(f"{at}.{name}") if name else None for name in (before, after))
        return Block(next(norms), next(norms), self.weights.kernels)

    def _norm(self, name: str) -> RmsNorm:
        spec = self.spec
        weight = self.weights.tensor(f"{name}.weight", torch.float32 if spec.norm_in_fp32 else None)
        weight = weight + spec.norm_offset if spec.norm_offset else weight
        return RmsNorm(weight, spec.rms_norm_eps, self.weights.kernels)

    def _attention(self, index: int, at: str) -> SelfAttention:
        spec, names, weights = self.spec, self.names, self.weights
        parts = (names.qkv,) if names.qkv else (names.q, names.k, names.v)
        norms = None
        if spec.qk_norm != "none":
            norms = self._qk_norms(self._norm(f"{at}.{names.q_norm}"), self._norm(f"{at}.{names.k_norm}"))
        o = weights.linear([f"{at}.{names.o}"], bias=spec.output_bias)
        return SelfAttention(
            layer=index,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            qkv=weights.linear([f"{at}.{part}" for part in parts], bias=spec.qkv_bias),
            o=o if self.group is None else SummedLinear(o, self.group),
            norms=norms,
            sinks=weights.tensor(f"{at}.{names.sinks}") if spec.attention_sinks else None,
            kernels=weights.kernels,
        )

    def _qk_norms(self, q: RmsNorm, k: RmsNorm) -> QkNorms:
        group, whole = self.group, self.whole
        if group is None or self.spec.qk_norm == "head":
            return QkNorms(q, k, each_head=self.spec.qk_norm == "head")
        copies = max(group.ranks // whole.num_kv_heads, 1)
        return QkNorms(
            AllHeadsNorm(q.weight, q.eps, whole.num_heads * whole.head_dim, 1, group),
            AllHeadsNorm(k.weight, k.eps, whole.num_kv_heads * whole.head_dim, copies, group),
            each_head=False,
        )

    def _summed_mlp(self, part: Mlp) -> Mlp:
        return part if self.group is None else SummedMlp(part, self.group)

    def _mlp(self, at: str) -> Mlp:
        spec, names = self.spec, self.names
        parts = (names.gate_up,) if names.gate_up else (names.gate, names.up)
        return GatedMlp(
            self.weights.linear([f"{at}.{part}" for part in parts], bias=spec.mlp_bias),
            self.weights.linear([f"{at}.{names.down}"], bias=spec.mlp_bias),
            self.weights.kernels.gated(spec.activation),
        )

    def _sparse_mlp(self, at: str) -> Mlp:
        assert self.spec.moe is not None, "a sparse layer without experts"
        return build_sparse_mlp(self.spec.moe, self.spec, self.names, self.weights, at)


def rotary_table(
    rope: RopeSpec, context_tokens: int, device: torch.device, kernels: Kernels = TORCH_KERNELS
) -> RotaryTable:
    """Of an engine with that context limit, for all layers that rotate so."""
    return build_rotary_table(
        rope.frequencies(context_tokens),
        context_tokens,
        device,
        attention_factor=rope.attention_factor,
        interleaved=rope.interleaved,
        kernels=kernels,
    )
