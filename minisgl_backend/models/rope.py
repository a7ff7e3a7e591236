"""What rotates queries and keys: frequencies and a factor, of each way in which models stretch them. Pure, no torch.

Where it stands in the flow: read out of config.json by `rope_fields.py`, turned into tables by `load.py`.

A position's rotation depends on the model and on the engine's context limit, and on nothing else. Rotated keys stay in
the prefix cache and are shared by whoever has the same prefix, so what rotates them can not change with the length of
one sequence or with its neighbours. Two kinds do so by design, "dynamic" and "longrope", and transformers follows the
longest sequence of a batch there. Here they are decided once for an engine, from the length up to which it may serve
(vLLM does the same for longrope); docs/models.md tells what that means for the operator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol


class RopeScaling(Protocol):
    """One way to make a model serve more than it was trained for, or none."""

    @property
    def kind(self) -> str:
        """As in config.json."""
        ...

    @property
    def attention_factor(self) -> float:
        """cos and sin are multiplied by it, so scores grow with its square."""
        ...

    def frequencies(self, theta: float, rotary_dim: int, context_tokens: int) -> tuple[float, ...]:
        """See RopeSpec.frequencies."""
        ...


@dataclass(frozen=True, slots=True)
class Unscaled:
    """RoFormer, Su et al. 2021."""

    kind: ClassVar[str] = "default"
    attention_factor: ClassVar[float] = 1.0

    def frequencies(self, theta: float, rotary_dim: int, context_tokens: int) -> tuple[float, ...]:
        return _plain(theta, rotary_dim)


@dataclass(frozen=True, slots=True)
class Linear:
    """Position interpolation, Chen et al. 2023: every pair turns slower."""

    factor: float
    original_tokens: int = 0  # before the stretching; 0: config.json does not say
    kind: ClassVar[str] = "linear"
    attention_factor: ClassVar[float] = 1.0

    def frequencies(self, theta: float, rotary_dim: int, context_tokens: int) -> tuple[float, ...]:
        return tuple(plain / self.factor for plain in _plain(theta, rotary_dim))


@dataclass(frozen=True, slots=True)
class DynamicNtk:
    """NTK-aware scaling of theta by the length (u/bloc97 and u/emozilla 2023): by the longest the engine may serve."""

    factor: float
    original_tokens: int  # max_position_embeddings: up to it nothing is scaled
    kind: ClassVar[str] = "dynamic"
    attention_factor: ClassVar[float] = 1.0

    def frequencies(self, theta: float, rotary_dim: int, context_tokens: int) -> tuple[float, ...]:
        """rotary_dim is at least 4."""
        times = max(context_tokens, self.original_tokens) / self.original_tokens
        stretch = self.factor * times - (self.factor - 1.0)
        return _plain(theta * stretch ** (rotary_dim / (rotary_dim - 2)), rotary_dim)


@dataclass(frozen=True, slots=True)
class Llama3:
    """The blend of Llama 3.1's release: pairs that turn fast stay, slow ones are interpolated, between them both."""

    factor: float
    low_turns: float  # pairs with fewer turns over original_tokens are slowed by factor
    high_turns: float  # pairs with more stay as they are
    original_tokens: int
    kind: ClassVar[str] = "llama3"
    attention_factor: ClassVar[float] = 1.0

    def frequencies(self, theta: float, rotary_dim: int, context_tokens: int) -> tuple[float, ...]:
        return tuple(self._blend(plain) for plain in _plain(theta, rotary_dim))

    def _blend(self, plain: float) -> float:
        turns = self.original_tokens * plain / (2.0 * math.pi)
        kept = min(1.0, max(0.0, (turns - self.low_turns) / (self.high_turns - self.low_turns)))
        return plain * kept + plain / self.factor * (1.0 - kept)


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN, Peng et al. 2023: Llama3's idea with a ramp over the pairs' places, and sharper attention."""

    factor: float
    original_tokens: int
    attention_factor: float
    fast_turns: float = 32.0  # beta_fast: pairs with more turns over original_tokens stay as they are
    slow_turns: float = 1.0  # beta_slow: pairs with fewer are slowed by factor
    truncate: bool = True  # the ramp starts and ends at whole pairs
    kind: ClassVar[str] = "yarn"

    def frequencies(self, theta: float, rotary_dim: int, context_tokens: int) -> tuple[float, ...]:
        start, end = self._ramp(theta, rotary_dim)
        scaled = []
        for pair, plain in enumerate(_plain(theta, rotary_dim)):
            slowed = min(1.0, max(0.0, (pair - start) / (end - start)))
            scaled.append(plain / self.factor * slowed + plain * (1.0 - slowed))
        return tuple(scaled)

    def _ramp(self, theta: float, rotary_dim: int) -> tuple[float, float]:
        """The places, among the pairs, between which frequencies pass from plain to slowed.

        Their upper limit is that of transformers: rotary_dim - 1, though there are only half as many pairs.
        """

        def place(turns: float) -> float:
            wavelength = self.original_tokens / turns
            return rotary_dim * math.log(wavelength / (2.0 * math.pi)) / (2.0 * math.log(theta))

        start, end = place(self.fast_turns), place(self.slow_turns)
        if self.truncate:
            start, end = math.floor(start), math.ceil(end)
        start, end = max(start, 0), min(end, rotary_dim - 1)
        return start, end if end != start else start + 0.001


@dataclass(frozen=True, slots=True)
class LongRope:
    """LongRoPE, Ding et al. 2024: a divisor of its own for each pair, out of two sets."""

    short: tuple[float, ...]  # rotary_dim / 2 of them, for engines that serve no more than original_tokens
    long: tuple[float, ...]  # as many, for all others, and there for sequences of every length
    original_tokens: int
    attention_factor: float
    kind: ClassVar[str] = "longrope"

    def frequencies(self, theta: float, rotary_dim: int, context_tokens: int) -> tuple[float, ...]:
        divisors = self.long if context_tokens > self.original_tokens else self.short
        plain = _plain(theta, rotary_dim)
        return tuple(frequency / divisor for frequency, divisor in zip(plain, divisors, strict=True))


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """How some layers of a model rotate. The first rotary_dim dimensions of a head do, in rotary_dim / 2 pairs."""

    theta: float
    rotary_dim: int  # even, at most the model's head_dim
    scaling: RopeScaling = Unscaled()
    interleaved: bool = False  # dimensions 2i and 2i + 1 are a pair (GLM-4); else i and i + rotary_dim / 2

    @property
    def kind(self) -> str:
        """As in config.json."""
        return self.scaling.kind

    @property
    def attention_factor(self) -> float:
        """cos and sin are multiplied by it; the dimensions that do not rotate are not."""
        return self.scaling.attention_factor

    def frequencies(self, context_tokens: int) -> tuple[float, ...]:
        """Radians per position of each pair, in an engine that serves sequences of up to context_tokens."""
        return self.scaling.frequencies(self.theta, self.rotary_dim, context_tokens)

    def table_bytes(self, context_tokens: int) -> int:
        """Of cos and sin in fp32 at every position."""
        return 4 * self.rotary_dim * context_tokens

    def made_for_tokens(self, stated_tokens: int) -> int:
        """The model's own context limit. stated_tokens: max_position_embeddings of config.json.

        With the original length known, that times the factor; max_position_embeddings is never multiplied, because in
        many checkpoints it is the stretched length already (gpt-oss, DeepSeek, Gemma 3), while in others it is the
        original one or leaves room for an answer (Qwen 2.5 and 3 with YaRN).
        """
        match self.scaling:
            case Linear(factor, original) | Yarn(factor, original):
                return max(stated_tokens, int(original * factor))
            case _:
                return stated_tokens

    def settable_tokens(self, made_for_tokens: int) -> int:
        """The largest context limit that an operator may set, where the model's own is made_for_tokens.

        Beyond it: a linear rope without an original length, which may be of either sort (vicuna-16k states the
        original one); and a dynamic one, with which a longer limit makes also short sequences rotate otherwise.
        """
        match self.scaling:
            case Linear(factor, original_tokens=0) | DynamicNtk(factor):
                return max(made_for_tokens, int(made_for_tokens * factor))
            case _:
                return made_for_tokens


def _plain(theta: float, rotary_dim: int) -> tuple[float, ...]:
    return tuple(theta ** (-2.0 * pair / rotary_dim) for pair in range(rotary_dim // 2))


def yarn_attention_factor(factor: float, mscale: float, mscale_all_dim: float) -> float:
    """Of a Yarn whose config.json names no attention_factor. mscale, mscale_all_dim: 0 where they are absent.

    The paper's 0.1 ln(factor) + 1; DeepSeek's quotient of two of them where both scales are given.
    """

    def sharpness(scale: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0

    return sharpness(mscale) / sharpness(mscale_all_dim) if mscale and mscale_all_dim else sharpness(1.0)


def longrope_attention_factor(factor: float, original_tokens: int) -> float:
    """Of a LongRope whose config.json names no attention_factor. original_tokens: at least 2."""
    return 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original_tokens))
