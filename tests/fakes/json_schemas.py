"""Two hundred JSON schemas after the shapes of the JSON Schema test suite (2020-12), written here: each another one,
all out of keywords that are enforced.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

Schema = dict[str, Any]


def schemas() -> list[Schema]:
    """In a fixed order."""
    found = [*_plain(), *_numbers(), *_strings(), *_arrays(), *_objects(), *_combined(), *_referring(), *_nested()]
    return found


def _object(required: list[str] | None = None, **properties: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties) if required is None else required}


def _plain() -> list[Schema]:
    values: list[list[Any]] = [
        [1],
        ["a", "b"],
        [None],
        [True, False],
        [0, False],
        [[]],
        [{}],
        [6, "foo", [], True, {"foo": 12}],
        ["foo\nbar", "foo\rbar"],
        ['quote"', "back\\slash"],
        ["ä", "日本", "😀"],
        [1.5, -2.25, 1e20, 0.1],
        [{"a": [1, {"b": None}]}],
        [9007199254740993, -(2**62)],
        ["hello\x00there"],
        [[False]],
    ]
    types = ["string", "integer", "number", "boolean", "null", "object", "array"]
    return (
        [{"enum": group} for group in values]
        + [{"const": group[0]} for group in values]
        + [{"type": kind} for kind in types]
        + [{"type": [one, other]} for one, other in pairwise(types)]
        + [{"type": "integer", "enum": [1, "a", 2.0, None]}, {"type": ["string", "null"], "enum": ["x", None, 3]}, {}]
    )


def _numbers() -> list[Schema]:
    integers = [
        {"minimum": 3},
        {"maximum": -3},
        {"minimum": -5, "maximum": 13},
        {"exclusiveMinimum": 3},
        {"exclusiveMaximum": 10, "minimum": 0},
        {"minimum": 1.1, "maximum": 3.9},
        {"multipleOf": 3},
        {"multipleOf": 7, "minimum": 10, "maximum": 100},
        {"minimum": 100, "maximum": 100},
        {"minimum": 999, "maximum": 10001},
        {"exclusiveMinimum": -1, "exclusiveMaximum": 1},
        {"minimum": -(10**12)},
        {"minimum": 4, "exclusiveMinimum": 2, "maximum": 9, "exclusiveMaximum": 20},
    ]
    numbers = [
        {"minimum": 0.5},
        {"maximum": 3.0},
        {"minimum": 0.5, "maximum": 1.25},
        {"exclusiveMinimum": 1.1},
        {"exclusiveMaximum": 3},
        {"minimum": -2, "exclusiveMaximum": -1.5},
        {"minimum": -0.1, "maximum": 0.1},
        {"minimum": 10, "maximum": 10.5},
        {"exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"minimum": 100, "maximum": 2000},
    ]
    return [{"type": "integer", **bounds} for bounds in integers] + [{"type": "number", **bounds} for bounds in numbers]


def _strings() -> list[Schema]:
    patterns = (
        "^[a-z]+$", "a.c", "^.*$", "^[^a]+$", r"^\d{3}-\d{4}$", r"^\S{1,2}@\S$", "^(ab|cd){1,3}$", "^a|b$",
        r"^\w+\.txt$",
        r"^[A-F0-9]{2}(:[A-F0-9]{2}){2}$", "^x*$", r"^[^\s,]{1,5}$", "^日+$", r"^\u0041[\x42-\x44]$", "^(?:a?b){2}$",
        "^$", r"^[\w.+-]+$", "^(?P<n>q)+$", r"^\(\[\{$", "^a{2,}$",
    )  # fmt: skip
    lengths = [(0, 0), (1, 1), (2, 4), (0, 20), (3, None), (7, 9), (None, 2), (1, 300)]
    formats = ("date", "time", "date-time", "ipv4", "ipv6", "uuid", "hostname", "duration", "json-pointer")
    bounded = []
    for low, high in lengths:
        bounds = {"minLength": low, "maxLength": high}
        bounded.append({"type": "string", **{key: value for key, value in bounds.items() if value is not None}})
    return (
        [{"type": "string", "pattern": pattern} for pattern in patterns]
        + bounded
        + [{"type": "string", "format": name} for name in formats]
        + [{"minLength": 2, "maxLength": 3}, {"type": ["string", "integer"], "maxLength": 2, "minimum": 7}]
    )


def _arrays() -> list[Schema]:
    forms = [
        {"items": {"type": "boolean"}},
        {"items": {"type": "integer"}, "minItems": 2},
        {"items": {"type": "null"}, "maxItems": 3},
        {"items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 1},
        {"minItems": 2},
        {"maxItems": 0},
        {"prefixItems": [{"type": "null"}, {"type": "boolean"}]},
        {"prefixItems": [{"type": "null"}], "items": False},
        {"prefixItems": [{"type": "null"}, {"type": "boolean"}], "items": {"const": 1}, "minItems": 3, "maxItems": 4},
        {"prefixItems": [{"type": "integer"}], "minItems": 2},
        {"prefixItems": [{"type": "integer"}, {"type": "null"}, {"type": "boolean"}], "maxItems": 2},
        {"items": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}, "maxItems": 3},
        {"items": _object(a={"type": "integer"}), "minItems": 1, "maxItems": 2},
        {"items": False},
        {"items": True, "maxItems": 2},
        {"uniqueItems": False, "items": {"type": "integer"}},
        {"uniqueItems": True, "maxItems": 1},
    ]
    return [{"type": "array", **form} for form in forms] + [{"items": {"type": "null"}}]


def _objects() -> list[Schema]:
    null, integer = {"type": "null"}, {"type": "integer"}
    forms = [
        {"properties": {"foo": integer, "bar": {"type": "string"}}},
        {"properties": {"foo": {}, "bar": {}}, "required": ["foo"]},
        {"required": ["a"]},
        {"required": ["foo\nbar", 'foo"bar', "foo\\bar", "é"]},
        {"properties": {"a": integer}, "required": ["b"]},
        {"properties": {"a": integer}, "required": ["b"], "additionalProperties": null},
        {"properties": {"a": integer}, "additionalProperties": True},
        {"properties": {"a": integer, "ab": integer, "b": integer}, "additionalProperties": null},
        {"properties": {"key": integer}, "additionalProperties": {"type": "boolean"}, "required": ["key"]},
        {"properties": {"^[-]": integer, "a.b": null}, "additionalProperties": {"type": "boolean"}},
        {"properties": {"a": null}, "additionalProperties": False},
        {"additionalProperties": {"type": "boolean"}},
        {"additionalProperties": False},
        {"patternProperties": {"^a[0-9]$": integer}},
        {"patternProperties": {"f.o": integer}, "additionalProperties": False},
        {"propertyNames": {"pattern": "^[a-c]$"}},
        {"propertyNames": {"maxLength": 3}, "additionalProperties": null},
        {"propertyNames": {"enum": ["foo", "bar"]}, "additionalProperties": integer},
        {"properties": {"a": null, "b": null, "c": null}, "minProperties": 1},
        {"properties": {"a": null, "b": null, "c": null}, "minProperties": 2, "maxProperties": 2},
        {"properties": {"a": null, "b": null, "c": null}, "maxProperties": 1},
        {"properties": {"a": null, "b": null, "c": null}, "required": ["b"], "maxProperties": 2},
        {"maxProperties": 2},
        {"maxProperties": 0},
        {"properties": {"a": {"type": "string", "maxLength": 4}}, "required": ["a"]},
    ]
    return [{"type": "object", **form} for form in forms] + [
        {"properties": {"a": integer}, "title": "by its keyword alone"},
        {"properties": {"a": null}, "required": ["a"], "x-hint": 1, "description": "annotated", "default": {}},
    ]


def _combined() -> list[Schema]:
    integer, string = {"type": "integer"}, {"type": "string", "maxLength": 3}
    tagged = [_object(kind={"const": name}, value=value) for name, value in (("i", integer), ("s", string))]
    return [
        {"anyOf": [integer, {"type": "null"}]},
        {"anyOf": [integer, string, {"type": "array", "items": integer, "maxItems": 2}]},
        {"anyOf": [{"minimum": 2, "type": "integer"}, {"const": -1}]},
        {"anyOf": [_object(foo=integer), _object(bar=string)]},
        {"oneOf": [integer, {"type": "null"}]},
        {"oneOf": tagged, "discriminator": {"propertyName": "kind"}},
        {"oneOf": [{"const": 1}, {"const": "one"}]},
        {"allOf": [integer]},
        {"allOf": [_object(a=string)]},
        _object(a={"anyOf": [integer, {"type": "null"}], "default": None}, b={"type": ["boolean", "null"]}),
    ]


def _referring() -> list[Schema]:
    chain = {"a": {"type": "integer"}, "b": {"$ref": "#/definitions/a"}, "c": {"$ref": "#/definitions/b"}}
    names = {"name": {"type": "string", "pattern": "^a+$"}}
    integer, link = {"type": "integer"}, {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
    return [
        {"$ref": "#/$defs/a", "$defs": {"a": integer}},
        {"$ref": "#/definitions/c", "definitions": chain},

        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "null"}}},
        {"$ref": "#/$defs/p%25q", "$defs": {"p%q": integer}},
        _object([], a=integer, b={"$ref": "#/properties/a"}),
        {"type": "array", "prefixItems": [integer, {"$ref": "#/prefixItems/0"}], "items": False},
        {"$ref": "#/$defs/node", "$defs": {"node": _object(v=integer, next=link)}},
        _object([], v=integer, again={"$ref": "#"}),
        {"type": "array", "maxItems": 2, "items": {"anyOf": [integer, {"$ref": "#"}]}},
        {"$defs": names, "type": "object", "additionalProperties": {"$ref": "#/$defs/name"}},
    ]  # fmt: skip


def _nested() -> list[Schema]:
    """Objects as people ask for them: of every kind one property, in changing company."""
    leaves: list[Schema] = [
        {"type": "string", "maxLength": 8},
        {"type": "integer", "minimum": 0, "maximum": 150},
        {"type": "boolean"},
        {"enum": ["red", "green", "blue"]},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 1, "maxItems": 3},
        {"type": "string", "pattern": r"^[A-Z]{2}\d{2}$"},
        {"type": "string", "format": "date"},
    ]
    found = []
    for first, one in enumerate(leaves):
        for second, other in enumerate(leaves[first + 1 :]):
            inner = _object([] if (first + second) % 2 else None, city=one, code=other)
            found.append(_object(name=other, address=inner, tags={"type": "array", "items": one, "maxItems": 2}))
    return found
