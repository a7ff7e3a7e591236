"""Schemas that no finite text meets, and references that go round without saying anything.

Where it stands in the flow: the last check of `schema.py`, on the schema it has written: `$ref`, `anyOf`, `oneOf`,
`enum` and types are all there is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from minisgl_backend.errors import InvalidRequest

_PREFIX = "#/$defs/"


def refuse_endless(field: str, top: dict[str, Any], definitions: Mapping[str, Any]) -> None:
    """Raises InvalidRequest naming `$ref`: the only way to be endless."""
    for name in definitions:
        if name in _followed(definitions[name], definitions):
            raise InvalidRequest(field, "$ref goes round: a schema refers to itself as a whole")
    finite: set[str] = set()
    while fresh := [name for name in definitions if name not in finite and _can_end(definitions[name], finite)]:
        finite.update(fresh)
    if len(finite) < len(definitions) or not _can_end(top, finite):
        raise InvalidRequest(field, "$ref makes a schema that contains itself: no text that meets it ever ends")


def _followed(schema: dict[str, Any], definitions: Mapping[str, Any]) -> set[str]:
    """Names that stand for the whole of a schema, directly or by others."""
    found: set[str] = set()
    waiting = list(_whole(schema))
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting.extend(_whole(definitions[name]))
    return found


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
