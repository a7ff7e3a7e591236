"""Structural tags: free text in which some passages have a form, such as the calls of tools.

Where it stands in the flow: `spec.py`. A tag is written anew out of the formats and keys below, its schemas and
patterns too, since the grammar library passes over keys that it does not know. Both of vLLM's forms are read:

    {"type": "structural_tag", "format": {"type": "triggered_tags", …}}           the present one
    {"type": "structural_tag", "structures": [{"begin", "schema", "end"}], "triggers": […]}   the older
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minisgl_backend.errors import InvalidRequest, UnsupportedFeature
from minisgl_backend.text.structured.pattern import plain_pattern
from minisgl_backend.text.structured.schema import enforced_schema
from minisgl_backend.text.values import read_flag, shown

MAX_TAG_DEPTH = 16
_MAX_REPEATS = 10_000
_MAX_WHITE_SPACE = 8  # between the parts of a JSON text


def plain_tag(field: str, tag: dict[str, Any]) -> dict[str, Any]:
    """Raises InvalidRequest or UnsupportedFeature, naming the field."""
    if "structures" in tag:
        _known(field, tag, ("type", "structures", "triggers"))
        if not isinstance(tag["structures"], list):
            raise InvalidRequest(field, "structures must be a list")
        tags = [_of_structure(field, item) for item in tag["structures"]]
        form: Any = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
    else:
        _known(field, tag, ("type", "format"))
        form = tag.get("format")
    return {"type": "structural_tag", "format": _format(field, form, 0)}


def _of_structure(field: str, item: Any) -> dict[str, Any]:
    _known(field, item, ("begin", "schema", "end"))
    content = {"type": "json_schema", "json_schema": item.get("schema")}
    return {"type": "tag", "begin": item.get("begin"), "content": content, "end": item.get("end")}


def _format(field: str, form: Any, depth: int) -> dict[str, Any]:
    if depth > MAX_TAG_DEPTH:
        raise InvalidRequest(field, f"is nested more than {MAX_TAG_DEPTH} deep")
    kind = form.get("type") if isinstance(form, dict) else None
    if not isinstance(kind, str) or kind not in _FORMATS:
        raise UnsupportedFeature(field, f"format {shown(kind)} is not supported; known are {', '.join(_FORMATS)}")
    readers = _FORMATS[kind]
    _known(field, form, ("type", *readers))
    written = {key: read(f"{field}: {key}", form[key], depth) for key, read in readers.items() if key in form}
    for key in readers:
        if key not in form and key not in _OPTIONAL:
            raise InvalidRequest(field, f"a format {kind} has no {key}")
    if kind == "repeat" and not 0 <= written["min"] <= written["max"]:
        raise InvalidRequest(field, "a repeat has bounds that are the wrong way round")
    bounded = {"max_whitespace_cnt": _MAX_WHITE_SPACE} if kind == "json_schema" else {}
    return {"type": kind, **written, **bounded}


def _known(field: str, form: Any, known: tuple[str, ...]) -> None:
    if not isinstance(form, dict):
        raise InvalidRequest(field, f"must hold an object, got {shown(form)}")
    for key in form:
        if key not in known:
            raise UnsupportedFeature(field, f"key {shown(key)} is not supported; known are {', '.join(known)}")


def _text(field: str, value: Any, depth: int) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(field, f"must be a string that is not empty, got {shown(value)}")
    return value


def _end(field: str, value: Any, depth: int) -> str | list[str]:
    return _texts(field, value, depth) if isinstance(value, list) else _text(field, value, depth)


def _texts(field: str, value: Any, depth: int) -> list[str]:
    if not isinstance(value, list) or not value:
        raise InvalidRequest(field, f"must be a list of strings, got {shown(value)}")
    return [_text(field, item, depth) for item in value]


def _flag(field: str, value: Any, depth: int) -> bool:
    if (found := read_flag(value)) is None:
        raise InvalidRequest(field, f"must be true or false, got {shown(value)}")
    return found


def _count(field: str, value: Any, depth: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_REPEATS:
        raise InvalidRequest(field, f"must be an integer from 0 to {_MAX_REPEATS}, got {shown(value)}")
    return value


def _schema(field: str, value: Any, depth: int) -> dict[str, Any]:
    return enforced_schema(field, value)


def _pattern(field: str, value: Any, depth: int) -> str:
    return plain_pattern(field, _text(field, value, depth))


def _inner(field: str, value: Any, depth: int) -> dict[str, Any]:
    return _format(field.partition(":")[0], value, depth + 1)


def _inners(field: str, value: Any, depth: int) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise InvalidRequest(field, f"must be a list that is not empty, got {shown(value)}")
    return [_inner(field, item, depth) for item in value]


def _tags(field: str, value: Any, depth: int) -> list[dict[str, Any]]:
    tags = _inners(field, value, depth)
    if any(tag["type"] != "tag" for tag in tags):
        raise InvalidRequest(field, "must hold formats of the type tag")
    return tags


_Reader = Callable[[str, Any, int], Any]

_SWITCHES: dict[str, _Reader] = {"at_least_one": _flag, "stop_after_first": _flag}
_OPTIONAL = ("at_least_one", "stop_after_first", "excludes")

_FORMATS: dict[str, dict[str, _Reader]] = {
    "const_string": {"value": _text},
    "any_text": {"excludes": _texts},
    "json_schema": {"json_schema": _schema},
    "regex": {"pattern": _pattern},
    "grammar": {"grammar": _text},
    "sequence": {"elements": _inners},
    "or": {"elements": _inners},
    "optional": {"content": _inner},
    "star": {"content": _inner},
    "plus": {"content": _inner},
    "repeat": {"min": _count, "max": _count, "content": _inner},
    "tag": {"begin": _text, "content": _inner, "end": _end},
    "triggered_tags": {"triggers": _texts, "tags": _tags, "excludes": _texts, **_SWITCHES},
    "tags_with_separator": {"tags": _tags, "separator": _text, **_SWITCHES},
}
"""Format → its keys, with the reader of each."""
