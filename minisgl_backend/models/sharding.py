"""What one rank of several has of a model: its part of the shape, and of each tensor (tensor parallelism).

Where it stands in the flow: load.py reads through `SharedTensors` and builds of it a decoder that is narrower, whose
parts the group puts together (layers/parallel.py). Attention heads, the inner vectors of MLPs and experts, and the
vocabulary are dealt out; norms and routers are on every rank. A KV head is on several ranks where there are fewer than
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minisgl_backend.config import Quantization
from minisgl_backend.errors import ConfigError
from minisgl_backend.models.checkpoint import TensorSource
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.tensors import expected_tensors
from minisgl_backend.models.weight_names import WeightNames

_MOST_RANKS = 64


@dataclass(frozen=True, slots=True)
class Share:
    """One rank of several."""

    rank: int
    ranks: int

    def of(self, size: int) -> tuple[int, int]:
        """Of so many things in a row, this rank's: from, to. There are ranks · k of them."""
        part = size // self.ranks
        return self.rank * part, (self.rank + 1) * part

    def of_kv_heads(self, heads: int) -> tuple[int, int]:
        """As `of`; of fewer heads than ranks, the one that this rank's query heads read."""
        if heads >= self.ranks:
            return self.of(heads)
        head = self.rank * heads // self.ranks
        return head, head + 1

    def of_vocabulary(self, size: int) -> tuple[int, int]:
        """As `of`, for any size: the last ranks may have fewer, or none."""
        rows = vocabulary_rows(size, self.ranks)
        return min(self.rank * rows, size), min((self.rank + 1) * rows, size)


def vocabulary_rows(size: int, ranks: int) -> int:
    """Of the embedding and the head on every rank, those of nobody included."""
    return -(-size // ranks)


def check_ranks(spec: ModelSpec, ranks: int, quantization: Quantization = "none") -> None:
    """Raises ConfigError, with the degrees that do: the model can not be dealt out to so many."""
    if ranks == 1:
        return
    if quantization != "none":
        raise ConfigError(
            f"setting 'tensor_parallel' is {ranks}, but 'quantization' is {quantization!r}: quantised weights are not "
            "dealt out by this version; leave one of them at 1 or 'none'"
        )
    if not (obstacle := _obstacle(spec, ranks)):
        return
    fit = [str(degree) for degree in range(1, _MOST_RANKS + 1) if not _obstacle(spec, degree)]
    raise ConfigError(f"setting 'tensor_parallel' is {ranks}, but {obstacle}; this model takes {', '.join(fit)}")


def _obstacle(spec: ModelSpec, ranks: int) -> str:
    if spec.num_heads % ranks:
        return f"{spec.num_heads} query heads can not be dealt out evenly"
    if spec.num_kv_heads % ranks and ranks % spec.num_kv_heads:
        return f"{spec.num_kv_heads} KV heads can not be dealt out evenly"
    for name, size in _inner_sizes(spec).items():
        if size % ranks:
            return f"the {name} of {size} can not be dealt out evenly"
    return ""


def _inner_sizes(spec: ModelSpec) -> Mapping[str, int]:
    """Of the MLPs that there are."""
    sizes = {}
    if not all(layer.sparse for layer in spec.layers):
        sizes["intermediate_size"] = spec.intermediate_size
    if spec.moe is not None and any(layer.sparse for layer in spec.layers):
        sizes["intermediate_size of an expert"] = spec.moe.intermediate_size
        sizes["intermediate_size of the shared expert"] = spec.moe.shared_intermediate_size
    return sizes


def share_of(spec: ModelSpec, share: Share) -> ModelSpec:
    """The shape of a rank's part, with so many rows of the vocabulary as every rank has."""
    moe, ranks = spec.moe, share.ranks
    if moe is not None:
        moe = replace(
            moe,
            intermediate_size=moe.intermediate_size // ranks,
            shared_intermediate_size=moe.shared_intermediate_size // ranks,
        )
    return replace(
        spec,
        num_heads=spec.num_heads // ranks,
        num_kv_heads=max(spec.num_kv_heads // ranks, 1),
        intermediate_size=spec.intermediate_size // ranks,
        vocab_size=vocabulary_rows(spec.vocab_size, ranks),
        moe=moe,
    )


@dataclass(frozen=True, slots=True)
class _Cut:
    """Of a tensor's axis the ranges, one after another. Where there are fewer than `rows`, zeros follow."""

    axis: int
    ranges: tuple[tuple[int, int], ...]
    rows: int = 0

    def __call__(self, whole: Tensor) -> Tensor:
        parts = [whole.narrow(self.axis, begin, end - begin) for begin, end in self.ranges]
        part = parts[0] if len(parts) == 1 else torch.cat(parts, self.axis)
        missing = self.rows - part.shape[0] if self.rows else 0
        return torch.cat((part, part.new_zeros(missing, *part.shape[1:]))) if missing else part


@dataclass(frozen=True, slots=True)
class _Zeros:
    """What rank 0 adds to the sum of all ranks, the others add nothing to."""

    def __call__(self, whole: Tensor) -> Tensor:
        return torch.zeros_like(whole)


_Take = _Cut | _Zeros


class SharedTensors:
    """See TensorSource: a rank's part of another one's tensors. What is not dealt out is as it is there."""

    def __init__(self, source: TensorSource, spec: ModelSpec, names: WeightNames, share: Share) -> None:
        """spec: of the whole model, whose tensors are those of `source`."""
        self._source = source
        self._takes = _takes(spec, names, share)
        parts = expected_tensors(share_of(spec, share), names)
        self._shapes = {name: parts.get(name, shape) for name, shape in source.shapes().items()}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> Tensor:
        """A view where one range of rows is taken, else a copy."""
        take, whole = self._takes.get(name), self._source.read(name)
        return whole if take is None else take(whole).contiguous()


def _takes(spec: ModelSpec, names: WeightNames, share: Share) -> dict[str, _Take]:
    """By the names of the tensors that are dealt out."""
    vocabulary = _Cut(0, (share.of_vocabulary(spec.vocab_size),), vocabulary_rows(spec.vocab_size, share.ranks))
    takes: dict[str, _Take] = {f"{names.embedding}.weight": vocabulary, f"{names.head}.weight": vocabulary}
    for index, layer in enumerate(spec.layers):
        at = names.layer.format(layer=index)
        inside = _attention(spec, names, share) | (
            _experts(spec, names, share) if layer.sparse else _mlp(spec, names, share)
        )
        takes |= {f"{at}.{name}": take for name, take in inside.items()}
    return takes


def _attention(spec: ModelSpec, names: WeightNames, share: Share) -> dict[str, _Take]:
    dim, q_size, kv_size = spec.head_dim, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    heads, kv_heads = share.of(spec.num_heads), share.of_kv_heads(spec.num_kv_heads)
    q, kv = (heads[0] * dim, heads[1] * dim), (kv_heads[0] * dim, kv_heads[1] * dim)
    takes: dict[str, _Take] = {}
    if names.qkv:
        stacked = (q, (q_size + kv[0], q_size + kv[1]), (q_size + kv_size + kv[0], q_size + kv_size + kv[1]))
        takes |= _dealt_rows(names.qkv, _Cut(0, stacked))
    else:
        takes |= _dealt_rows(names.q, _Cut(0, (q,)))
        takes |= _dealt_rows(names.k, _Cut(0, (kv,))) | _dealt_rows(names.v, _Cut(0, (kv,)))
    takes |= _dealt_columns(names.o, _Cut(1, (q,)), share)
    if spec.qk_norm == "all":
        takes |= {f"{names.q_norm}.weight": _Cut(0, (q,)), f"{names.k_norm}.weight": _Cut(0, (kv,))}
    if spec.attention_sinks:
        takes[names.sinks] = _Cut(0, (heads,))
    return takes


def _mlp(spec: ModelSpec, names: WeightNames, share: Share) -> dict[str, _Take]:
    size = spec.intermediate_size
    begin, end = share.of(size)
    takes = _dealt_columns(names.down, _Cut(1, ((begin, end),)), share)
    if names.gate_up:
        return takes | _dealt_rows(names.gate_up, _Cut(0, ((begin, end), (size + begin, size + end))))
    inner = _Cut(0, ((begin, end),))
    return takes | _dealt_rows(names.gate, inner) | _dealt_rows(names.up, inner)


def _experts(spec: ModelSpec, names: WeightNames, share: Share) -> dict[str, _Take]:
    """Each expert is dealt out like an MLP, so that a rank's work does not depend on what routers choose."""
    moe = spec.moe
    assert moe is not None, "a sparse layer without experts"
    begin, end = share.of(moe.intermediate_size)
    takes: dict[str, _Take] = {}
    if names.experts_gate_up:  # [experts, hidden, 2 · inner], the columns of gate and up taking turns
        takes[names.experts_gate_up] = _Cut(2, ((2 * begin, 2 * end),))
        takes[names.experts_down] = _Cut(1, ((begin, end),))
        takes[f"{names.experts_gate_up}_bias"] = _Cut(1, ((2 * begin, 2 * end),))
        if share.rank:
            takes[f"{names.experts_down}_bias"] = _Zeros()
    else:
        for expert in range(moe.num_experts):
            for name in (names.expert_gate, names.expert_up):
                takes |= _dealt_rows(name.format(expert=expert), _Cut(0, ((begin, end),)))
            takes |= _dealt_columns(names.expert_down.format(expert=expert), _Cut(1, ((begin, end),)), share)
    if moe.shared_intermediate_size:
        shared = share.of(moe.shared_intermediate_size)
        for name in (names.shared_gate, names.shared_up):
            takes |= _dealt_rows(name, _Cut(0, (shared,)))
        takes |= _dealt_columns(names.shared_down, _Cut(1, (shared,)), share)
    return takes


def _dealt_rows(name: str, cut: _Cut) -> dict[str, _Take]:
    return {f"{name}.weight": cut, f"{name}.bias": cut}


def _dealt_columns(name: str, cut: _Cut, share: Share) -> dict[str, _Take]:
    takes: dict[str, _Take] = {f"{name}.weight": cut}
    if share.rank:
        takes[f"{name}.bias"] = _Zeros()
    return takes
