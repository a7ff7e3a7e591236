"""The part of a schema that speaks of values of one type → the same in keywords that the grammar library enforces.

Where it stands in the flow: `schema.py` calls `typed_schema` for each subschema that combines no others. A `Place`
says where in the client's schema we are, for the message of a refusal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minisgl_backend.errors import InvalidRequest, UnsupportedFeature
from minisgl_backend.text.structured.names import other_than
from minisgl_backend.text.structured.pattern import plain_pattern
from minisgl_backend.text.values import MAX_INT, shown

FAMILIES: dict[str, tuple[str, ...]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "object": (
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
    ),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
}
"""Type → the keywords that speak of its values."""

TYPES = ("string", "number", "integer", "object", "array", "boolean", "null")

MAX_MULTIPLE = 1000
_MAX_BOUND = 10**15  # up to there doubles hold every integer, and the library's ranges were tried

_IPV4 = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_FEBRUARY = r"02-(0[1-9]|1[0-9]|2[0-8])"
_DATE = rf"[1-9][0-9]{{3}}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|{_FEBRUARY})"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
_HEX = "[0-9a-fA-F]"

FORMATS: dict[str, str | None] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "ipv4": rf"({_IPV4}\.){{3}}{_IPV4}",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "email": None,
    "hostname": None,
    "ipv6": None,
    "uri": None,
    "uri-reference": None,
    "duration": None,
    "json-pointer": None,
}
"""Format → what a value matches; None: the library's own pattern."""

Build = Callable[[Any, "Place"], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Place:
    """Of a subschema in the client's schema: a JSON pointer."""

    field: str
    path: str

    def at(self, key: str) -> Place:
        return Place(self.field, f"{self.path}/{key}")

    def wrong(self, problem: str) -> InvalidRequest:
        return InvalidRequest(self.field, f"{self._shown} {problem}")

    def impossible(self, why: str) -> InvalidRequest:
        return InvalidRequest(self.field, f"{self._shown} can not be met: {why}")

    def unsupported(self, keyword: str, how: str = "") -> UnsupportedFeature:
        how = f" {how}" if how else ""
        return UnsupportedFeature(self.field, f"keyword {shown(keyword)}{how} is not enforced (at {self._shown})")

    @property
    def _shown(self) -> str:
        return ascii(self.path)[1:-1][-120:]


def typed_schema(schema: dict[str, Any], types: tuple[str, ...], place: Place, build: Build) -> dict[str, Any]:
    """types: empty for any value. build: of a subschema."""
    writers = {"string": _string, "integer": _integer, "number": _number, "object": _object, "array": _array}
    written = [{"type": kind, **(writers[kind](schema, place, build) if kind in writers else {})} for kind in types]
    if not written:
        return {}
    return written[0] if len(written) == 1 else {"anyOf": written}


# ── strings ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _string(schema: dict[str, Any], place: Place, build: Build) -> dict[str, Any]:
    bounds = _bounds(schema, place, "minLength", "maxLength")
    exact = [key for key in ("pattern", "format") if key in schema]
    if len(exact) + bool(bounds) > 1:
        others = [key for key in (*exact, "minLength", "maxLength") if key in schema]
        raise place.unsupported(others[-1], f"beside {others[0]}")
    if "pattern" in schema:
        pattern = schema["pattern"]
        if not isinstance(pattern, str):
            raise place.at("pattern").wrong(f"must be a string, got {shown(pattern)}")
        return {"pattern": _whole(place, pattern)}
    if "format" in schema:
        return _format(schema["format"], place)
    return bounds


def _whole(place: Place, pattern: str) -> str:
    return f"^({plain_pattern(place.field, pattern, in_json=True)})$"


def _format(name: Any, place: Place) -> dict[str, Any]:
    if not isinstance(name, str) or name not in FORMATS:
        raise place.unsupported("format", f"{shown(name)} (known are {', '.join(FORMATS)})")
    pattern = FORMATS[name]
    return {"format": name} if pattern is None else {"pattern": _whole(place, pattern)}


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _integer(schema: dict[str, Any], place: Place, build: Build) -> dict[str, Any]:
    low = _tightest(schema, place, max, minimum=math.ceil, exclusiveMinimum=lambda bound: math.floor(bound) + 1)
    high = _tightest(schema, place, min, maximum=math.floor, exclusiveMaximum=lambda bound: math.ceil(bound) - 1)
    multiple = _multiple(schema, place)
    if low is not None and high is not None and -(-low // multiple) * multiple > high:
        raise place.impossible("no integer is within its bounds")
    bounds = {"minimum": low, "maximum": high, "multipleOf": multiple if multiple > 1 else None}
    return {key: bound for key, bound in bounds.items() if bound is not None}


def _multiple(schema: dict[str, Any], place: Place) -> int:
    given = schema.get("multipleOf", 1)
    if isinstance(given, bool) or not isinstance(given, int | float) or given <= 0:
        raise place.at("multipleOf").wrong(f"must be a number above 0, got {shown(given)}")
    if given != int(given) or given > MAX_MULTIPLE:
        raise place.unsupported("multipleOf", f"other than integers up to {MAX_MULTIPLE}")
    return int(given)


def _tightest(
    schema: dict[str, Any], place: Place, choose: Callable[..., int], **readers: Callable[[float], int]
) -> int | None:
    bounds = [read(_number_of(schema, key, place)) for key, read in readers.items() if key in schema]
    return choose(bounds) if bounds else None


def _number(schema: dict[str, Any], place: Place, build: Build) -> dict[str, Any]:
    if "multipleOf" in schema:
        raise place.unsupported("multipleOf", "of numbers that are not integers")
    keys = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    bounds = {key: _number_of(schema, key, place) for key in keys if key in schema}
    for inclusive, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if inclusive in bounds and exclusive in bounds:
            raise place.unsupported(exclusive, f"beside {inclusive}")
    low = bounds.get("minimum", bounds.get("exclusiveMinimum", -math.inf))
    high = bounds.get("maximum", bounds.get("exclusiveMaximum", math.inf))
    if low > high or (low == high and len(bounds.keys() & {"minimum", "maximum"}) < 2):
        raise place.impossible("no number is within its bounds")
    return bounds


def _number_of(schema: dict[str, Any], key: str, place: Place) -> float:
    bound = schema[key]
    if isinstance(bound, bool) or not isinstance(bound, int | float):
        raise place.at(key).wrong(f"must be a number, got {shown(bound)}")
    if not -_MAX_BOUND <= bound <= _MAX_BOUND or 0 < abs(bound) < 1e-6:
        raise place.at(key).wrong(f"must be 0 or a number from 1e-6 to 1e15 (or below 0), got {shown(bound)}")
    return bound


# ── arrays ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _array(schema: dict[str, Any], place: Place, build: Build) -> dict[str, Any]:
    bounds = _bounds(schema, place, "minItems", "maxItems")
    least, most = bounds.get("minItems", 0), bounds.get("maxItems", MAX_INT)
    if schema.get("uniqueItems", False) is not False and most > 1:
        raise place.unsupported("uniqueItems")
    prefix, items = schema.get("prefixItems", []), schema.get("items")
    if not isinstance(prefix, list):
        raise place.at("prefixItems").wrong(f"must be a list, got {shown(prefix)}")
    if isinstance(items, list):
        raise place.unsupported("items", "that is a list (write prefixItems)")
    if items is None:
        items = not prefix or least > len(prefix)
    if items is False and least > len(prefix):
        raise place.impossible("minItems asks for more than prefixItems has, and items forbids others")
    first = [build(item, place.at("prefixItems").at(str(i))) for i, item in enumerate(prefix[:most])]
    rest: Any = False if items is False or len(first) >= most else build(items, place.at("items"))
    if rest is False and not first:
        return {"items": {}, "maxItems": 0}
    return {**bounds, **({"prefixItems": first} if first else {}), "items": rest}


# ── objects ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _object(schema: dict[str, Any], place: Place, build: Build) -> dict[str, Any]:
    bounds = _bounds(schema, place, "minProperties", "maxProperties")
    properties, required = _properties(schema, place, build), _required(schema, place)
    others = _others(schema, properties, required, place, build)
    closed = others.get("additionalProperties") is False and "patternProperties" not in others
    least, most = bounds.get("minProperties", 0), bounds.get("maxProperties", MAX_INT)
    if least and not closed:
        raise place.unsupported("minProperties", "of an object whose keys are not all named")
    if len(required) > most or least > len(properties):
        raise place.impossible("the number of properties is out of its bounds")
    own = {"properties": properties} if properties else {}
    return {**own, **({"required": required} if required else {}), **others, **bounds}


def _properties(schema: dict[str, Any], place: Place, build: Build) -> dict[str, Any]:
    given = schema.get("properties", {})
    if not isinstance(given, dict):
        raise place.at("properties").wrong(f"must be an object, got {shown(given)}")
    return {name: build(sub, place.at("properties").at(name)) for name, sub in given.items()}


def _required(schema: dict[str, Any], place: Place) -> list[str]:
    given = schema.get("required", [])
    if not isinstance(given, list) or any(not isinstance(name, str) for name in given):
        raise place.at("required").wrong("must be a list of strings")
    return list(dict.fromkeys(given))


def _others(
    schema: dict[str, Any], properties: dict[str, Any], required: list[str], place: Place, build: Build
) -> dict[str, Any]:
    """What is said of keys that are not named. Adds to `properties` those that are only required."""
    given = schema.get("additionalProperties", not (properties or "patternProperties" in schema))
    missing = [name for name in required if name not in properties]
    for keyword in ("patternProperties", "propertyNames"):
        if keyword in schema:
            if properties or missing or len({"patternProperties", "propertyNames"} & schema.keys()) > 1:
                raise place.unsupported(keyword, "beside properties, required or each other")
            return _keys(schema, keyword, given, place, build)
    if missing and given is False and "additionalProperties" in schema:
        raise place.impossible(f"required names {shown(missing[0])}, which additionalProperties forbids")
    at = place.at("additionalProperties")
    for name in missing:
        properties[name] = {} if given is False else build(given, at)
    if given is False or (missing and "additionalProperties" not in schema):
        return {"additionalProperties": False}
    other = build(given, at)
    if not properties:
        return {"additionalProperties": other or True}
    return {"patternProperties": {other_than(place, properties): other}, "additionalProperties": False}


def _keys(schema: dict[str, Any], keyword: str, given: Any, place: Place, build: Build) -> dict[str, Any]:
    at = place.at(keyword)
    if keyword == "propertyNames":
        names = build(schema[keyword], at)
        if not names:
            return {"additionalProperties": build(given, place.at("additionalProperties")) or True}
        if names.get("type") != "string" and not _are_strings(names.get("enum")):
            raise place.unsupported(keyword, "other than of strings")
        return {"propertyNames": names, "additionalProperties": build(given, place.at("additionalProperties")) or True}
    patterns = schema[keyword]
    if not isinstance(patterns, dict) or len(patterns) != 1:
        raise place.unsupported(keyword, "other than one")
    if given is not False:
        raise place.unsupported(keyword, "beside additionalProperties that is not false")
    pattern, sub = next(iter(patterns.items()))
    return {"patternProperties": {_whole(place, pattern): build(sub, at.at(pattern))}, "additionalProperties": False}


def _are_strings(values: list[Any] | None) -> bool:
    return values is not None and all(isinstance(value, str) for value in values)


def _bounds(schema: dict[str, Any], place: Place, low: str, high: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for key in (low, high):
        if key in schema:
            bound = schema[key]
            if isinstance(bound, bool) or not isinstance(bound, int | float) or not 0 <= bound <= MAX_INT:
                raise place.at(key).wrong(f"must be an integer from 0 to {MAX_INT}, got {shown(bound)}")
            if bound != int(bound):
                raise place.at(key).wrong(f"must be an integer, got {shown(bound)}")
            found[key] = int(bound)
    if found.get(low, 0) > found.get(high, MAX_INT):
        raise place.impossible(f"{low} is above {high}")
    return found
