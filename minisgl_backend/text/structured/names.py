"""A pattern for all keys of an object but those that are named: the keys that `additionalProperties` speaks of.

Where it stands in the flow: `typed.py`. The grammar library keeps named keys apart from others as they are spelt, but
`"\\u0061"` is `"a"` spelt otherwise. Keys that match a pattern have no escapes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minisgl_backend.text.structured.typed import Place

MAX_NAME_CHARS, MAX_NAMES_CHARS = 64, 2000
"""Of one key, and of all keys of an object that has others beside them."""

_NEVER = '"\\\\\\x00-\\x1f'  # what stands in no key without an escape
_END = ""


def other_than(place: Place, names: Iterable[str]) -> str:
    """Raises UnsupportedFeature when they are too long."""
    names = list(names)
    if max(map(len, names)) > MAX_NAME_CHARS or sum(map(len, names)) > MAX_NAMES_CHARS:
        raise place.unsupported("additionalProperties", f"beside properties of more than {MAX_NAMES_CHARS} characters")
    tree: dict[str, Any] = {}
    for name in names:
        at = tree
        for character in name:
            at = at.setdefault(character, {})
        at[_END] = {}
    return f"^{_others(tree)}$"


def _others(tree: dict[str, Any]) -> str:
    """What may follow so that no name comes out."""
    known = sorted(character for character in tree if character)
    ways = [f"[^{_NEVER}{''.join(map(_in_set, known))}][^{_NEVER}]*"]
    ways += [f"{_escaped(character)}{_others(tree[character])}" for character in known if not _hidden(character)]
    return f"({'|'.join(ways)}{'' if _END in tree else '|'})"


def _hidden(character: str) -> bool:
    """Whether it needs an escape: no key that has none begins like this."""
    return character in '"\\' or ord(character) < 0x20


def _in_set(character: str) -> str:
    return "" if _hidden(character) else "\\" + character if character in "^[]-" else character


def _escaped(character: str) -> str:
    return "\\" + character if character in "^$.*+?()[]{}|/" else character
