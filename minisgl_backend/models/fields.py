"""The fields of a config.json, typed: a value is checked where it is read, and a wrong one is named. Pure, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minisgl_backend.errors import ModelUnsupported

_MOST = 1 << 53  # of a whole number: fp64 holds all up to it
_NEAREST, _FARTHEST = 1e-30, 1e30  # from zero: products, quotients and squares of such numbers stay finite in fp64


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """One JSON object of a model's folder over its family's defaults. Every method but `get` raises ModelUnsupported.

    As in transformers, a field that is left out takes the family's default, and one that is written as null is null:
    a Mistral without `sliding_window` has a window of 4096, one with a null there has none. The `default` of a method
    is what null stands for; without one, null is refused.
    """

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    place: str = "config.json"

    def get(self, key: str, default: Any = None) -> Any:
        """The field as it was written, else the family's default; `default` when that is null, or neither is there."""
        value = self.values[key] if key in self.values else self.defaults.get(key)
        return default if value is None else value

    def positive(self, key: str, default: int | None = None, *, at_most: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self.whole(key, default, at_least=1)
        if at_most is not None and value > at_most:
            raise ModelUnsupported(f"{self.place}: {key} must be at most {at_most}, got {value}")
        return value

    def whole(self, key: str, default: int | None = None, *, at_least: int = 0) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= _MOST:
            wanted = "a positive integer" if at_least == 1 else f"an integer of at least {at_least}"
            raise ModelUnsupported(f"{self.place}: {key} must be {wanted}, got {value!r}")
        return value

    def wholes(self, key: str) -> tuple[int, ...] | None:
        """A list of whole numbers, or None when it is absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(entry) is int and 0 <= entry <= _MOST for entry in value):
            raise ModelUnsupported(f"{self.place}: {key} must be a list of integers of at least 0, got {value!r}")
        return tuple(value)

    def number(self, key: str, default: float | None = None) -> float:
        """A number greater than 0."""
        value = self.get(key, default)
        if not is_positive(value):
            raise ModelUnsupported(f"{self.place}: {key} must be a positive number, got {value!r}")
        return float(value)

    def number_or_none(self, key: str) -> float | None:
        """A number greater than 0, or None when it is null or not there."""
        return None if self.get(key) is None else self.number(key)

    def epsilon(self, key: str) -> float:
        """What a norm adds to a mean of squares."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise ModelUnsupported(f"{self.place}: {key} must be a small number, got {value!r}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if value not in (True, False):
            raise ModelUnsupported(f"{self.place}: {key} must be true or false, got {value!r}")
        return bool(value)

    def choice(self, key: str, choices: Mapping[str, str]) -> str:
        """The field's value looked up in `choices`."""
        value = self.get(key)
        if not isinstance(value, str) or value not in choices:
            raise ModelUnsupported(f"{self.place}: {key} {value!r} is not supported; {', '.join(choices)} are")
        return choices[value]

    def strings(self, key: str) -> tuple[str, ...] | None:
        """A list of strings, or None when it is absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise ModelUnsupported(f"{self.place}: {key} must be a list of strings, got {value!r}")
        return tuple(value)

    def flags(self, key: str) -> tuple[bool, ...] | None:
        """A list of flags, or None when it is absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(entry in (True, False) for entry in value):
            raise ModelUnsupported(f"{self.place}: {key} must be a list of flags, got {value!r}")
        return tuple(bool(entry) for entry in value)

    def refuse(self, key: str, reason: str) -> None:
        """Raises when the field has any other value than null, false, 0, or an empty one."""
        if value := self.get(key):
            raise ModelUnsupported(f"{self.place}: {key} {value!r} is not supported; {reason}")


def is_positive(value: Any) -> bool:
    """Whether a value is a number greater than 0 that is safe to calculate with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and _NEAREST <= value <= _FARTHEST
