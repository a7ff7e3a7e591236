"""What one rank of several has of each tensor of a model (tensor parallelism).

Where it stands in the flow: load.py reads through `SharedTensors` and builds of it a decoder that is narrower
(ranks.py), whose parts the group puts together (layers/parallel.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl_backend.models.checkpoint import TensorSource
from minisgl_backend.models.ranks import Share, share_of, vocabulary_rows
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.tensors import expected_tensors
from minisgl_backend.models.weight_names import WeightNames


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
