"""Schemas that no finite text meets, and references that go round without saying anything.

Where it stands in the flow: the last check of `schema.py`, on the schema it has written: `$ref`, `anyOf`, `oneOf`,
`enum` and types are all there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from minisgl_backend.errors import InvalidRequest

_PREFIX = "#/$defs/"


def refuse_endless(field: str, top: dict[str, Any], definitions: Mapping[str, Any]) -> None:
    """Raises InvalidRequest naming `$ref`: the only way to be endless."""
    whole = {name: frozenset(_whole(definition)) for name, definition in definitions.items()}
    if len(_settled(whole, lambda name, settled: whole[name] <= settled)) < len(definitions):
        raise InvalidRequest(field, "$ref goes round: a schema refers to itself as a whole")
    named = {name: frozenset(_named(definition)) for name, definition in definitions.items()}
    finite = _settled(named, lambda name, finite: _can_end(definitions[name], finite))
    if len(finite) < len(definitions) or not _can_end(top, finite):
        raise InvalidRequest(field, "$ref makes a schema that contains itself: no text that meets it ever ends")


def _settled(names: Mapping[str, frozenset[str]], settles: Callable[[str, set[str]], bool]) -> set[str]:
    """Names that settle once enough of those that they name have; each is asked again only after one of them did."""
    users: dict[str, list[str]] = {name: [] for name in names}
    for name, own in names.items():
        for other in own:
            users[other].append(name)
    settled: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in settled and settles(name, settled):
            settled.add(name)
            waiting.extend(users[name])
    return settled


def _named(schema: Any) -> Iterator[str]:
    """Names anywhere in a schema, as far as `_can_end` looks."""
    if "$ref" in schema:
        yield schema["$ref"].removeprefix(_PREFIX)
    items = schema.get("items")
    below = (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("prefixItems", ()))
    for sub in (*below, *schema.get("properties", {}).values(), *([items] if isinstance(items, dict) else [])):
        yield from _named(sub)


def _whole(schema: dict[str, Any]) -> Iterator[str]:
    if "$ref" in schema:
        yield schema["$ref"].removeprefix(_PREFIX)
    for way in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _whole(way)


def _can_end(schema: dict[str, Any], finite: set[str]) -> bool:
    if "$ref" in schema:
        return schema["$ref"].removeprefix(_PREFIX) in finite
    ways = (*schema.get("anyOf", ()), *schema.get("oneOf", ()))
    if ways:
        return any(_can_end(way, finite) for way in ways)
    if schema.get("type") == "object":
        properties = schema.get("properties", {})
        return all(_can_end(properties[name], finite) for name in schema.get("required", ()))
    if schema.get("type") == "array":
        least, prefix = schema.get("minItems", 0), schema.get("prefixItems", [])
        needed = [*prefix[:least], *([schema["items"]] if least > len(prefix) else [])]
        return all(_can_end(item, finite) for item in needed)
    return True
