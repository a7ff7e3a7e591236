"""A client's JSON schema → one that says only what the grammar library enforces, or a refusal that names the keyword.

Where it stands in the flow: `spec.py` calls `enforced_schema` for every schema, before anything is compiled. xgrammar
passes over what it does not know (`not`, `uniqueItems`, a bound beside a pattern, …). So the schema is not handed on:
it is written anew, out of the keywords whose enforcement the tests show, and everything else is refused. It may be
narrower than the client's (a string with a pattern holds no escapes, an object with properties and no word about
others has no others), never wider: what matches it is valid under both.

    keyword ── annotation ─────────────────── left out
            ├─ enforced for the type at hand ─ written anew, by `typed.py`
            └─ anything else ────────────────  UnsupportedFeature
"""

from __future__ import annotations

from collections import deque
from typing import Any
from urllib.parse import unquote

from minisgl_backend.errors import InvalidRequest
from minisgl_backend.text.structured.ends import refuse_endless
from minisgl_backend.text.structured.typed import FAMILIES, TYPES, Place, typed_schema
from minisgl_backend.text.values import shown

MAX_DEPTH = 32
MAX_ENUM_VALUES = 2000
MAX_PLACES = 4000
"""Subschemas, with each reference counted once."""

ANNOTATIONS = frozenset(
    """title description default examples example deprecated readOnly writeOnly discriminator
    $schema $comment $defs definitions contentMediaType contentEncoding""".split()  # noqa: SIM905 - a list would be long
)
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "enum", "const")
_KNOWN = frozenset((*_COMBINING, "type", *(word for words in FAMILIES.values() for word in words)))


def enforced_schema(field: str, schema: Any) -> dict[str, Any]:
    """Raises InvalidRequest (no schema, impossible, too large) or UnsupportedFeature, naming the keyword's place."""
    walk = _Walk(field, schema)
    top = walk.built(schema, Place(field, "#"), 0)
    definitions = walk.definitions()
    refuse_endless(field, top, definitions)
    if definitions:
        top = {**top, "$defs": definitions} if "$ref" not in top else {"anyOf": [top], "$defs": definitions}
    return top


class _Walk:
    """One schema on its way. Every subschema that is referred to becomes a definition `r0`, `r1`, …"""

    def __init__(self, field: str, root: Any) -> None:
        self._field = field
        self._root = root
        self._names: dict[str, str] = {}  # pointer → name
        self._unbuilt: deque[str] = deque()  # pointers of definitions that are still to be built
        self._places = 0
        self._enum_values = 0

    def definitions(self) -> dict[str, Any]:
        """Builds all that was referred to; building one may refer to more."""
        built: dict[str, Any] = {}
        while self._unbuilt:
            pointer = self._unbuilt.popleft()
            built[self._names[pointer]] = self.built(self._target(pointer), Place(self._field, pointer), 0)
        return built

    def built(self, schema: Any, place: Place, depth: int) -> dict[str, Any]:
        self._places += 1
        if depth > MAX_DEPTH:
            raise InvalidRequest(self._field, f"is nested more than {MAX_DEPTH} deep")
        if self._places > MAX_PLACES:
            raise InvalidRequest(self._field, f"has more than {MAX_PLACES} subschemas")
        if schema is True:
            return {}
        if schema is False:
            raise place.impossible("false accepts nothing")
        if not isinstance(schema, dict):
            raise place.wrong(f"must be an object, true or false, got {shown(schema)}")
        for key in schema:
            if (
                key not in _KNOWN
                and key not in ANNOTATIONS
                and not key.startswith("x-")
                and not self._own_id(key, place)
            ):
                raise place.unsupported(key)
        combining = [key for key in _COMBINING if key in schema]
        if combining:
            return self._combined(schema, combining[0], place, depth)
        return typed_schema(schema, _types(schema, place), place, lambda sub, at: self.built(sub, at, depth + 1))

    def _own_id(self, key: str, place: Place) -> bool:
        """The name of the whole schema changes nothing; within it, it would change what references mean."""
        return key == "$id" and place.path == "#"

    def _combined(self, schema: dict[str, Any], key: str, place: Place, depth: int) -> dict[str, Any]:
        values = key in ("enum", "const")
        for other in schema:
            if other != key and other in _KNOWN and not (values and other == "type"):
                raise place.unsupported(other, f"beside {key}")
        at, value = place.at(key), schema[key]
        if key == "$ref":
            return {"$ref": f"#/$defs/{self._referred(value, place)}"}
        if values:
            return self._values([value] if key == "const" else value, schema, at)
        if not isinstance(value, list) or not value:
            raise at.wrong("must be a list that is not empty")
        if key == "allOf" and len(value) > 1:
            raise place.unsupported(key, "with more than one schema")
        items = [self.built(item, at.at(str(index)), depth + 1) for index, item in enumerate(value)]
        return items[0] if len(items) == 1 else {key: items}

    def _values(self, values: Any, schema: dict[str, Any], place: Place) -> dict[str, Any]:
        if not isinstance(values, list) or not values:
            raise place.wrong("must be a list that is not empty")
        self._enum_values += len(values)
        if self._enum_values > MAX_ENUM_VALUES:
            raise InvalidRequest(self._field, f"has more than {MAX_ENUM_VALUES} values in enum and const")
        for value in values:
            _check_numbers(value, place)
        if "type" in schema:
            types = _types(schema, place)
            values = [value for value in values if any(_is_of(value, kind) for kind in types)]
        if not values:
            raise place.impossible("no value is of the type")
        return {"enum": values}

    def _referred(self, pointer: Any, place: Place) -> str:
        if not isinstance(pointer, str) or (pointer != "#" and not pointer.startswith("#/")):
            raise place.unsupported("$ref", "to anything but a place in the same schema (#/...)")
        self._target(pointer)
        if pointer not in self._names:
            self._names[pointer] = f"r{len(self._names)}"
            self._unbuilt.append(pointer)
        return self._names[pointer]

    def _target(self, pointer: str) -> Any:
        found = self._root
        for part in pointer.split("/")[1:]:
            part = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and part in found:
                found = found[part]
            elif isinstance(found, list) and part.isascii() and part.isdigit() and int(part) < len(found):
                found = found[int(part)]
            else:
                raise InvalidRequest(self._field, f"$ref names {shown(pointer)}, which is not there")
        return found


def _types(schema: dict[str, Any], place: Place) -> tuple[str, ...]:
    """The types a value may have; empty: any. Without `type`, those that the keywords speak of."""
    if "type" not in schema:
        return tuple(kind for kind, words in FAMILIES.items() if any(word in schema for word in words))
    given = schema["type"]
    types = given if isinstance(given, list) else [given]
    if not types or any(kind not in TYPES for kind in types):
        raise place.at("type").wrong(f"must be of {', '.join(TYPES)}, or a list of them")
    wider = {"integer"} if "number" in types else set()
    return tuple(kind for kind in dict.fromkeys(types) if kind not in wider)


def _is_of(value: Any, kind: str) -> bool:
    match kind:
        case "integer":
            return isinstance(value, int | float) and not isinstance(value, bool) and value == int(value)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case _:
            python = {"string": str, "boolean": bool, "null": type(None), "object": dict, "array": list}
            return isinstance(value, python[kind])


def _check_numbers(value: Any, place: Place) -> None:
    """What the library writes down exactly: integers of 64 bits, normal floats."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _check_numbers(item, place)
    elif isinstance(value, int) and not -(2**63) < value < 2**63:
        raise place.wrong("holds an integer of more than 64 bits")
    elif isinstance(value, float) and value and not 1e-300 < abs(value) < 1e300:
        raise place.wrong(f"holds {value!r}; numbers from 1e-300 to 1e300 are taken")
