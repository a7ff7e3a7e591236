"""How a config.json says what rotates: every spelling there ever was → RopeSpec. Pure, no torch.

`rope_scaling` (transformers 4) or `rope_parameters` (5), `type` or `rope_type`, `rope_theta`,
`partial_rotary_factor` and `original_max_position_embeddings` inside that object or beside it. As in transformers,
`rope_scaling` wins where both are given, and `rope_type` over `type`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from minisgl_backend.errors import ModelUnsupported
from minisgl_backend.models.fields import ConfigFields, is_positive
from minisgl_backend.models.layer_types import FULL, SLIDING
from minisgl_backend.models.rope import (
    DynamicNtk,
    Linear,
    Llama3,
    LongRope,
    RopeScaling,
    RopeSpec,
    Unscaled,
    Yarn,
    longrope_attention_factor,
    yarn_attention_factor,
)


def read_ropes(fields: ConfigFields, head_dim: int) -> tuple[RopeSpec, ...]:
    """One for all layers; (full attention, sliding attention) of a family whose defaults name rope_local_base_freq.

    A family without partial_rotary_factor in its defaults rotates whole heads, whatever config.json says: another
    value than 1 is refused there. Raises ModelUnsupported naming the field.
    """
    fields.refuse("rope_interleaved", "the layout of a head is the family's")
    given = _given(fields)
    by_layer_type = any(isinstance(value, Mapping) for value in given.values.values())
    if "rope_local_base_freq" not in fields.defaults:
        if by_layer_type:
            raise ModelUnsupported(f"{given.place} per layer type is not supported by this architecture")
        return (_read(fields, given, head_dim, "rope_theta"),)
    if by_layer_type:
        full, sliding = _of_layer_type(given, FULL), _of_layer_type(given, SLIDING)
    else:  # before transformers 5: what is given is that of full attention, windows are never stretched
        full, sliding = given, ConfigFields({}, {}, given.place)
    return (
        _read(fields, full, head_dim, "rope_theta"),
        _read(fields, sliding, head_dim, "rope_local_base_freq"),
    )


def _given(fields: ConfigFields) -> ConfigFields:
    place = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    return _object(fields.get(place, {}), f"{fields.place}: {place}")


def _of_layer_type(given: ConfigFields, layer_type: str) -> ConfigFields:
    return _object(given.get(layer_type), f"{given.place}.{layer_type}")


def _object(value: Any, place: str) -> ConfigFields:
    if not isinstance(value, Mapping):
        raise ModelUnsupported(f"{place} must be an object, got {value!r}")
    return ConfigFields(value, {}, place)


def _read(fields: ConfigFields, given: ConfigFields, head_dim: int, theta_key: str) -> RopeSpec:
    """given: the object of these layers; what it leaves out is in `fields`, theta under theta_key."""
    fallback = None if theta_key in fields.defaults else 10000.0  # a null there is refused, as transformers fails on it
    theta = fields.number(theta_key, fallback) if given.get("rope_theta") is None else given.number("rope_theta")
    rope = RopeSpec(theta, _rotary_dim(fields, given, head_dim))
    return replace(rope, scaling=_scaling(fields, given, rope))


def _rotary_dim(fields: ConfigFields, given: ConfigFields, head_dim: int) -> int:
    where = fields if given.get("partial_rotary_factor") is None else given
    share = where.number("partial_rotary_factor", 1.0)
    if share != 1.0 and "partial_rotary_factor" not in fields.defaults:
        raise ModelUnsupported(f"{where.place}: partial_rotary_factor {share} is not supported by this architecture")
    rotary_dim = int(head_dim * share)
    if share > 1.0 or rotary_dim < 2 or rotary_dim % 2:
        raise ModelUnsupported(
            f"{where.place}: partial_rotary_factor {share} of head_dim {head_dim} must be an even number of dimensions"
        )
    return rotary_dim


def _scaling(fields: ConfigFields, given: ConfigFields, rope: RopeSpec) -> RopeScaling:
    key = "type" if given.get("rope_type") is None else "rope_type"
    kind = given.get(key, "default")
    if not isinstance(kind, str) or kind not in _READERS:
        raise ModelUnsupported(f"{given.place}: {key} {kind!r} is not supported; {', '.join(_READERS)} are")
    return _READERS[kind](fields, given, rope)


def _unscaled(fields: ConfigFields, given: ConfigFields, rope: RopeSpec) -> Unscaled:
    return Unscaled()


def _linear(fields: ConfigFields, given: ConfigFields, rope: RopeSpec) -> Linear:
    key = "original_max_position_embeddings"
    return Linear(given.number("factor"), 0 if given.get(key) is None else given.positive(key))


def _dynamic(fields: ConfigFields, given: ConfigFields, rope: RopeSpec) -> DynamicNtk:
    """The length from which on it stretches is max_position_embeddings, also for transformers."""
    if rope.rotary_dim < 4:
        raise ModelUnsupported(f"{given.place}: dynamic needs at least 4 dimensions that rotate")
    return DynamicNtk(given.number("factor"), fields.positive("max_position_embeddings"))


def _llama3(fields: ConfigFields, given: ConfigFields, rope: RopeSpec) -> Llama3:
    low, high = given.number("low_freq_factor"), given.number("high_freq_factor")
    if high <= low:
        raise ModelUnsupported(f"{given.place}: high_freq_factor must be above low_freq_factor")
    return Llama3(given.number("factor"), low, high, _original_tokens(fields, given))


def _yarn(fields: ConfigFields, given: ConfigFields, rope: RopeSpec) -> RopeScaling:
    if given.get("long_factor") is not None:
        return _longrope(fields, given, rope)  # so named in the first checkpoints of Phi-3
    original = _original_tokens(fields, given)
    stretched = _stretched(fields, original)
    factor = given.number("factor", stretched if stretched > 1.0 else None)
    fast, slow = given.number("beta_fast", 32.0), given.number("beta_slow", 1.0)
    if fast < slow:
        raise ModelUnsupported(f"{given.place}: beta_fast must not be below beta_slow")
    if rope.theta <= 1.0:
        raise ModelUnsupported(f"{given.place}: yarn needs a rope_theta above 1, got {rope.theta}")
    attention = given.number("attention_factor", yarn_attention_factor(factor, *_mscales(given)))
    return Yarn(factor, original, attention, fast, slow, given.flag("truncate", True))


def _mscales(given: ConfigFields) -> tuple[float, float]:
    """0 counts as absent, as in transformers."""
    mscale, all_dim = (given.number(key) if given.get(key) else 0.0 for key in ("mscale", "mscale_all_dim"))
    return mscale, all_dim


def _longrope(fields: ConfigFields, given: ConfigFields, rope: RopeSpec) -> LongRope:
    original = _original_tokens(fields, given)
    if original < 2:
        raise ModelUnsupported(f"{given.place}: longrope needs an original_max_position_embeddings of at least 2")
    factor = given.number("factor", _stretched(fields, original))
    return LongRope(
        _divisors(given, "short_factor", rope),
        _divisors(given, "long_factor", rope),
        original,
        given.number("attention_factor", longrope_attention_factor(factor, original)),
    )


def _original_tokens(fields: ConfigFields, given: ConfigFields) -> int:
    """Beside the object before inside it, as in transformers; else the model was not stretched."""
    where = given if fields.get("original_max_position_embeddings") is None else fields
    return where.positive("original_max_position_embeddings", fields.positive("max_position_embeddings"))


def _stretched(fields: ConfigFields, original_tokens: int) -> float:
    """What stands for a factor that is not given (Phi-3, DeepSeek)."""
    return fields.positive("max_position_embeddings") / original_tokens


def _divisors(given: ConfigFields, key: str, rope: RopeSpec) -> tuple[float, ...]:
    values, wanted = given.get(key), rope.rotary_dim // 2
    if not isinstance(values, list) or not all(map(is_positive, values)):
        raise ModelUnsupported(f"{given.place}: {key} must be a list of positive numbers, got {values!r}")
    if len(values) != wanted:
        raise ModelUnsupported(f"{given.place}: {key} must have {wanted} numbers, one a pair, got {len(values)}")
    return tuple(float(value) for value in values)


_READERS: Mapping[str, Callable[[ConfigFields, ConfigFields, RopeSpec], RopeScaling]] = {
    "default": _unscaled,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # Phi-3 before it was given that name
}
