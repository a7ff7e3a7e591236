"""Which tensors a checkpoint of a spec must hold: name → shape. Pure, no torch.

Read by the loader before anything is loaded, by `minisgl inspect`, and by whoever makes a random model.
"""

from __future__ import annotations

from collections.abc import Iterator

from minisgl_backend.models.registry import FAMILIES
from minisgl_backend.models.spec import ModelSpec, MoeSpec
from minisgl_backend.models.weight_names import WeightNames

Shapes = dict[str, tuple[int, ...]]


def expected_tensors(spec: ModelSpec, names: WeightNames | None = None) -> Shapes:
    """Every tensor's name and shape, in the order of the model. names: instead of those of the family's checkpoints."""
    names = names or FAMILIES[spec.architecture].names
    shapes: Shapes = {f"{names.embedding}.weight": (spec.vocab_size, spec.hidden_size)}
    for index, layer in enumerate(spec.layers):
        at = names.layer.format(layer=index)
        inside = (*_norms(spec, names), *_attention(spec, names))
        for name, shape in (*inside, *(_experts(spec, names) if layer.sparse else _mlp(spec, names))):
            shapes[f"{at}.{name}"] = shape
    shapes[f"{names.final_norm}.weight"] = (spec.hidden_size,)
    if not spec.tie_embeddings:
        shapes[f"{names.head}.weight"] = (spec.vocab_size, spec.hidden_size)
    return shapes


def unused_tensors(spec: ModelSpec) -> list[str]:
    """Tensors that may be there and are not read: a tied LM head stored a second time, leftovers of old checkpoints."""
    names = FAMILIES[spec.architecture].names
    unused = [pattern.format(layer=layer) for pattern in names.unused for layer in range(spec.num_layers)]
    return [*unused, f"{names.head}.weight"] if spec.tie_embeddings else unused


_Entries = Iterator[tuple[str, tuple[int, ...]]]


def _norms(spec: ModelSpec, names: WeightNames) -> _Entries:
    for norm in (names.attention_in_norm, names.attention_out_norm, names.mlp_in_norm, names.mlp_out_norm):
        if norm:
            yield f"{norm}.weight", (spec.hidden_size,)


def _attention(spec: ModelSpec, names: WeightNames) -> _Entries:
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    if names.qkv:
        yield from _linear(names.qkv, q_size + 2 * kv_size, spec.hidden_size, spec.qkv_bias)
    else:
        for name, rows in ((names.q, q_size), (names.k, kv_size), (names.v, kv_size)):
            yield from _linear(name, rows, spec.hidden_size, spec.qkv_bias)
    yield from _linear(names.o, spec.hidden_size, q_size, spec.output_bias)
    if spec.qk_norm != "none":
        for name, size in ((names.q_norm, q_size), (names.k_norm, kv_size)):
            yield f"{name}.weight", (spec.head_dim if spec.qk_norm == "head" else size,)
    if spec.attention_sinks:
        yield names.sinks, (spec.num_heads,)


def _mlp(spec: ModelSpec, names: WeightNames) -> _Entries:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    if names.gate_up:
        yield from _linear(names.gate_up, 2 * inner, hidden, spec.mlp_bias)
    else:
        for name in (names.gate, names.up):
            yield from _linear(name, inner, hidden, spec.mlp_bias)
    yield from _linear(names.down, hidden, inner, spec.mlp_bias)


def _experts(spec: ModelSpec, names: WeightNames) -> _Entries:
    moe, hidden = spec.moe, spec.hidden_size
    assert moe is not None, "a sparse layer without experts"
    yield from _linear(names.router, moe.num_experts, hidden, moe.biases)
    yield from _stacked_experts(moe, hidden, names) if names.experts_gate_up else _single_experts(moe, hidden, names)
    if inner := moe.shared_intermediate_size:
        for name in (names.shared_gate, names.shared_up):
            yield from _linear(name, inner, hidden, False)
        yield from _linear(names.shared_down, hidden, inner, False)
        if moe.shared_gate:
            yield f"{names.shared_switch}.weight", (1, hidden)


def _single_experts(moe: MoeSpec, hidden: int, names: WeightNames) -> _Entries:
    for expert in range(moe.num_experts):
        for name in (names.expert_gate, names.expert_up):
            yield from _linear(name.format(expert=expert), moe.intermediate_size, hidden, moe.biases)
        yield from _linear(names.expert_down.format(expert=expert), hidden, moe.intermediate_size, moe.biases)


def _stacked_experts(moe: MoeSpec, hidden: int, names: WeightNames) -> _Entries:
    experts, inner = moe.num_experts, moe.intermediate_size
    yield names.experts_gate_up, (experts, hidden, 2 * inner)
    yield names.experts_down, (experts, inner, hidden)
    if moe.biases:
        yield f"{names.experts_gate_up}_bias", (experts, 2 * inner)
        yield f"{names.experts_down}_bias", (experts, hidden)


def _linear(name: str, rows: int, columns: int, bias: bool) -> _Entries:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)
