"""Whatever a client asks of its answer's form is read or refused by name: schemas, tags and patterns changed at random.

What is read is compiled next, in a process of its own; what raises anything else here would be an internal error.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from fakes.json_schemas import schemas
from minisgl_backend.errors import InvalidRequest, UnsupportedFeature
from minisgl_backend.text.structured.schema import ANNOTATIONS
from minisgl_backend.text.structured.spec import STRUCTURED_FIELDS, read_structured
from minisgl_backend.text.structured.typed import FAMILIES

FORMS = int(os.environ.get("MINISGL_FUZZ_OBJECTS", "10000")) // 5

SCHEMAS = schemas()
KEYWORDS = sorted(
    {*ANNOTATIONS, *(word for words in FAMILIES.values() for word in words)}
    | {"type", "$ref", "allOf", "anyOf", "oneOf", "enum", "const", "not", "if"}
)
TAG = {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": {}}, "end": "</a>"}
ENDS: list[dict[str, Any]] = [{"type": "any_text"}, {"type": "grammar", "grammar": 'root ::= "a"'}]
TAGS: list[dict[str, Any]] = [
    {"format": TAG},
    {
        "format": {
            "type": "sequence",
            "elements": [{"type": "regex", "pattern": "[a-z]+"}, {"type": "or", "elements": ENDS}],
        }
    },
    {"format": {"type": "triggered_tags", "triggers": ["<"], "tags": [TAG], "at_least_one": True}},
    {"format": {"type": "tags_with_separator", "separator": ",", "tags": [TAG]}},
    {"format": {"type": "repeat", "min": 1, "max": 3, "content": {"type": "optional", "content": TAG}}},
    {"structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}], "triggers": ["<f"]},
]
ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**63, -(2**70), 10**400, 1e308, 5e-324, 1.5, -0.0, float("nan"), float("inf")),
    *("", "x", "#", "#/", "#/$defs/a", "#/%zz", "^(", "[", "\ud800", "\0", "é" * 50, "a" * 5000, "{0,99999999999}"),
    *([], {}, [[]], [{}], {"type": 5}, {"$ref": 5}, {"$ref": "#"}, "string", ["string", 5], {"a": {}}, ["a", "a"]),
]
PARTS = [*"()[]{}1,-^$|*+?.\\a\né", "\\d", "\\u12", "\\x4", "\ud800", "(?:", "(?P<"]


@pytest.mark.slow
def test_any_form_is_read_or_refused_by_the_name_of_its_field() -> None:
    """A fifth of MINISGL_FUZZ_OBJECTS (200,000 under `make fuzz`)."""
    random, read = Random(20260106), 0
    for number in range(FORMS):
        field, value = form(random)
        try:
            read += read_structured({field: value}) is not None
        except (InvalidRequest, UnsupportedFeature) as refused:
            message = str(refused)
            assert message.startswith(field), (message, value)
            assert message.isascii() and message.isprintable() and len(message) < 400, (message, value)
        except Exception as error:
            raise AssertionError(f"form {number}: {field} {value!r:.500}") from error
    assert FORMS * 0.05 < read < FORMS * 0.95  # the generator reaches both sides


def form(random: Random) -> tuple[str, Any]:
    """A field and its value; some as a string of JSON."""
    kind = random.random()
    if kind < 0.6:
        field, value = random.choice(("guided_json", "json_schema")), changed(random, random.choice(SCHEMAS))
    elif kind < 0.75:
        field, value = "structured_outputs", {"structural_tag": changed(random, random.choice(TAGS))}
    elif kind < 0.85:
        named = {"type": "json_schema", "json_schema": {"name": "x", "schema": random.choice(SCHEMAS)}}
        field, value = "response_format", changed(random, random.choice((named, {"type": "structural_tag", **TAGS[0]})))
    elif kind < 0.92:
        field, value = random.choice(STRUCTURED_FIELDS), random.choice(ODD)
    else:
        return "guided_regex", "".join(random.choices(PARTS, k=random.randint(1, 20)))
    return field, json.dumps(value) if random.random() < 0.1 else value


def changed(random: Random, value: Any) -> Any:
    """A copy in which some places hold something else, more or nothing."""
    value = copy.deepcopy(value)
    for _ in range(random.choice((1, 1, 2, 3, 6))):
        found = list(places(value))
        if not found:
            return random.choice(ODD)
        holder, key = random.choice(found)
        how = random.random()
        if how < 0.6:
            holder[key] = copy.deepcopy(random.choice(ODD if how < 0.45 else SCHEMAS))
        elif how < 0.8 and isinstance(holder, dict):
            holder[random.choice(KEYWORDS)] = copy.deepcopy(random.choice([*ODD, *SCHEMAS]))
        else:
            del holder[key]
    return value


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every list or object within, with each of its keys."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, own in inside:
        yield value, key
        yield from places(own)
