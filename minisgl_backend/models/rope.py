"""Rotary frequencies as a checkpoint's config.json names them. Pure, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minisgl_backend.errors import ModelUnsupported

ROPE_KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """kind is one of ROPE_KINDS. The last four fields are those of kind "llama3"; factor is also of "linear"."""

    kind: str
    theta: float
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context_tokens: int = 0

    def frequencies(self, head_dim: int) -> tuple[float, ...]:
        """Radians per position of each of the head_dim / 2 pairs."""
        plain = (self.theta ** (-2.0 * i / head_dim) for i in range(head_dim // 2))
        return tuple(self._scaled(frequency) for frequency in plain)

    def _scaled(self, frequency: float) -> float:
        """linear: position interpolation, Chen et al. 2023. llama3: the blend of Llama 3.1's release."""
        if self.kind == "default":
            return frequency
        if self.kind == "linear":
            return frequency / self.factor
        turns = self.original_context_tokens * frequency / (2.0 * math.pi)
        if turns < self.low_frequency_factor:
            return frequency / self.factor
        if turns > self.high_frequency_factor:
            return frequency
        blend = (turns - self.low_frequency_factor) / (self.high_frequency_factor - self.low_frequency_factor)
        return (1.0 - blend) * frequency / self.factor + blend * frequency


def read_rope(config: Mapping[str, Any]) -> RopeSpec:
    """config.json → RopeSpec, from `rope_scaling` with `rope_theta` (transformers 4) or `rope_parameters` (5).

    As in transformers, `rope_scaling` wins where both are given. Raises ModelUnsupported naming the field.
    """
    place = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(place) or {}
    if not isinstance(given, Mapping):
        raise ModelUnsupported(f"config.json: {place} must be an object, got {given!r}")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise ModelUnsupported(f"config.json: {place} of kind {kind!r} is not supported; {', '.join(ROPE_KINDS)} are")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ModelUnsupported(f"config.json: {place} per layer type is not supported")
    partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelUnsupported(f"config.json: partial_rotary_factor {partial!r} is not supported")
    if config.get("rope_interleaved"):
        raise ModelUnsupported("config.json: rope_interleaved is not supported")

    def number(key: str, default: Any = None) -> float:
        value = given.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ModelUnsupported(f"config.json: {place}.{key} must be a positive number, got {value!r}")
        return float(value)

    theta = number("rope_theta", config.get("rope_theta") or 10000.0)
    if kind == "default":
        return RopeSpec(kind, theta)
    if kind == "linear":
        return RopeSpec(kind, theta, number("factor"))
    original = number("original_max_position_embeddings", config.get("max_position_embeddings"))
    spec = RopeSpec(kind, theta, number("factor"), number("low_freq_factor"), number("high_freq_factor"), int(original))
    if spec.high_frequency_factor <= spec.low_frequency_factor:
        raise ModelUnsupported(f"config.json: {place}.high_freq_factor must be above low_freq_factor")
    return spec
