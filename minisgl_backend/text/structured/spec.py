"""What a client asks of an answer's form, in whichever of the field's ways → one form for the compiler.

    structured_outputs ─ json, json_object, regex, choice, grammar, structural_tag ─┐
    guided_json, guided_regex, guided_choice, guided_grammar (older vLLM) ──────────┼─ read_structured ─► GrammarSpec
    response_format (OpenAI) ─ json_object, json_schema, structural_tag ────────────┤
    json_schema ────────────────────────────────────────────────────────────────────┘

Where it stands in the flow: beside the text actor's loop, for a request with one of these fields. Names and meanings
are vLLM's; a request has one form, so two are refused. What passes can be compiled, unless it is too large.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import msgspec

from minisgl_backend.errors import InvalidRequest, UnsupportedFeature
from minisgl_backend.text.structured.pattern import plain_pattern
from minisgl_backend.text.structured.schema import MAX_ENUM_VALUES, enforced_schema
from minisgl_backend.text.structured.tags import plain_tag
from minisgl_backend.text.values import flag, json_value, read_flag, read_object, shown, text

MAX_SOURCE_BYTES = 1 << 16
"""Of a schema, a grammar, a tag (as JSON), or all choices together."""


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True):
    """What to compile. The same content is the same grammar, whoever asks."""

    kind: Literal["schema", "regex", "ebnf", "tag"]
    source: str  # a schema or a tag as JSON
    field: str  # whose it is, for a refusal

    @property
    def json(self) -> bool:
        """The whole output is one JSON text."""
        return self.kind == "schema"


def read_structured(values: dict[str, Any]) -> GrammarSpec | None:
    """values: of the fields in STRUCTURED_FIELDS, null where the client gave none. None: any text.

    Raises InvalidRequest or UnsupportedFeature, naming the field.
    """
    asked = [(name, spec) for name, read in _READERS.items() if (spec := _read(name, values.get(name), read))]
    if len(asked) > 1:
        raise InvalidRequest(asked[1][0], f"is given together with {asked[0][0]}: an answer has one form")
    return asked[0][1] if asked else None


def _read(name: str, value: Any, read: Callable[[str, Any], GrammarSpec | None]) -> GrammarSpec | None:
    return None if value is None else read(name, value)


def _schema(field: str, value: Any) -> GrammarSpec:
    schema = json_value(value, field, MAX_SOURCE_BYTES) if isinstance(value, str) else value
    _bounded(field, _json(field, schema))
    return GrammarSpec("schema", _bounded(field, _json(field, enforced_schema(field, schema)), 4), field)


def _any_object(field: str, value: Any) -> GrammarSpec | None:
    return GrammarSpec("schema", '{"type":"object","additionalProperties":true}', field) if flag(field, value) else None


def _regex(field: str, value: Any) -> GrammarSpec:
    return GrammarSpec("regex", plain_pattern(field, text(field, value)), field)


def _ebnf(field: str, value: Any) -> GrammarSpec:
    return GrammarSpec("ebnf", _bounded(field, text(field, value)), field)


def _choice(field: str, value: Any) -> GrammarSpec:
    choices = json_value(value, field, MAX_SOURCE_BYTES) if isinstance(value, str) else value
    if not isinstance(choices, list | tuple) or not 1 <= len(choices) <= MAX_ENUM_VALUES:
        raise InvalidRequest(field, f"must be a list of 1 to {MAX_ENUM_VALUES} strings, got {shown(choices)}")
    if not all(text(field, choice) for choice in choices):
        raise InvalidRequest(field, "must hold no empty string")
    _bounded(field, _json(field, list(choices)))
    ways = " | ".join(_ebnf_string(choice) for choice in dict.fromkeys(choices))
    return GrammarSpec("ebnf", _bounded(field, f"root ::= {ways}", 4), field)


def _tag(field: str, value: Any) -> GrammarSpec:
    tag = read_object(field, value)
    _bounded(field, _json(field, tag))
    return GrammarSpec("tag", _bounded(field, _json(field, plain_tag(field, tag)), 4), field)


def _structured_outputs(field: str, value: Any) -> GrammarSpec | None:
    asked: list[tuple[str, GrammarSpec]] = []
    for key, own in read_object(field, value).items():
        name = f"{field}.{key}"[:80]
        if key in _KINDS:
            spec = _read(name, own, _KINDS[key])
            asked += [(name, spec)] if spec else []
        elif key not in _OPTIONS:
            raise InvalidRequest(field, f"has no key {shown(key)}; known are {', '.join(_KINDS)}")
        elif own is not None and read_flag(own) is not False and own != "auto":
            raise UnsupportedFeature(name)
    if len(asked) > 1:
        raise InvalidRequest(asked[1][0], f"is given together with {asked[0][0]}: an answer has one form")
    return asked[0][1] if asked else None


def _response_format(field: str, value: Any) -> GrammarSpec | None:
    form = read_object(field, value)
    kind = form.get("type")
    if kind == "structural_tag":
        return _tag(field, form)
    known = {"text": set(), "json_object": set(), "json_schema": {"json_schema"}}
    if not isinstance(kind, str) or kind not in known:
        raise InvalidRequest(f"{field}.type", f"must be one of {', '.join(known)}, structural_tag, got {shown(kind)}")
    _only(field, form, {"type", *known[kind]})
    if kind == "json_object":
        return _any_object(field, True)
    if kind == "text":
        return None
    name = f"{field}.json_schema"
    named = read_object(name, form.get("json_schema"))
    _only(name, named, {"name", "description", "schema", "strict"})
    if named.get("schema") is None:
        raise InvalidRequest(f"{name}.schema", "is missing")
    return _schema(f"{name}.schema", named["schema"])


def _only(field: str, form: dict[str, Any], known: set[str]) -> None:
    for key in form:
        if key not in known:
            raise InvalidRequest(field, f"has no key {shown(key)}; known are {', '.join(sorted(known))}")


def _json(field: str, value: Any) -> str:
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        written.encode()
        return written
    except RecursionError:
        raise InvalidRequest(field, "is nested too deeply") from None
    except UnicodeEncodeError:
        raise InvalidRequest(field, "holds a lone surrogate, which is no character") from None
    except (TypeError, ValueError):
        raise InvalidRequest(field, "holds a value that JSON has not, such as NaN") from None


def _bounded(field: str, source: str, times: int = 1) -> str:
    size = len(source.encode())
    if size > times * MAX_SOURCE_BYTES:
        raise InvalidRequest(field, f"must hold at most {times * MAX_SOURCE_BYTES} bytes, got {size}")
    return source


def _ebnf_string(choice: str) -> str:
    escaped = (f"\\x{ord(c):02x}" if ord(c) < 0x20 or c == "\x7f" else f"\\{c}" if c in '"\\' else c for c in choice)
    return f'"{"".join(escaped)}"'


_KINDS: dict[str, Callable[[str, Any], GrammarSpec | None]] = {
    "json": _schema,
    "json_object": _any_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _ebnf,
    "structural_tag": _tag,
}

_OPTIONS = (
    "disable_any_whitespace",
    "disable_additional_properties",
    "disable_fallback",
    "whitespace_pattern",
    "backend",
)
"""Of vLLM's form; refused unless off."""

_READERS: dict[str, Callable[[str, Any], GrammarSpec | None]] = {
    "structured_outputs": _structured_outputs,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _ebnf,
    "response_format": _response_format,
    "json_schema": _schema,
}

STRUCTURED_FIELDS = tuple(_READERS)
"""Parameters of a request that ask for a form."""


def kept(field: str, value: Any) -> Any:
    """Reads nothing yet: reading a large schema would keep others waiting."""
    return value


KEEPERS: dict[str, Callable[[Any], Any]] = {name: partial(kept, name) for name in STRUCTURED_FIELDS}
