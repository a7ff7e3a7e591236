"""Forms of answers: what is read, in whichever of the field's ways, and what is refused, by name."""

from __future__ import annotations

import itertools
import json
import sys
import time
from types import FrameType
from typing import Any

import pytest

from minisgl_backend.errors import InvalidRequest, RequestError, UnsupportedFeature
from minisgl_backend.text.structured.compiling import Compiler, GrammarFault
from minisgl_backend.text.structured.pattern import plain_pattern
from minisgl_backend.text.structured.schema import MAX_DEPTH, MAX_ENUM_VALUES
from minisgl_backend.text.structured.spec import MAX_SOURCE_BYTES, GrammarSpec, read_structured

INTEGER = {"type": "integer"}
TAG = {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": INTEGER, "end": "</f>"}]}


def schema_of(schema: Any) -> Any:
    spec = read_structured({"guided_json": schema})
    assert spec is not None
    return json.loads(spec.source)


@pytest.mark.parametrize(
    "values",
    [
        {"structured_outputs": {"json": INTEGER}},
        {"structured_outputs": json.dumps({"json": json.dumps(INTEGER)})},
        {"guided_json": INTEGER},
        {"guided_json": json.dumps(INTEGER)},
        {"json_schema": INTEGER},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": INTEGER}}},
    ],
)
def test_one_schema_is_the_same_in_every_way_of_giving_it(values: dict[str, Any]) -> None:
    spec = read_structured(values)
    assert spec is not None and spec.kind == "schema" and json.loads(spec.source) == INTEGER


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"guided_regex": "a+"}, "regex"),
        ({"structured_outputs": {"regex": "a+"}}, "regex"),
        ({"guided_choice": ["yes", 'n"o\n']}, "ebnf"),
        ({"structured_outputs": {"choice": '["yes"]'}}, "ebnf"),
        ({"guided_grammar": 'root ::= "a"'}, "ebnf"),
        ({"response_format": {"type": "json_object"}}, "schema"),
        ({"structured_outputs": {"json_object": True}}, "schema"),
        ({"structured_outputs": {"structural_tag": TAG}}, "tag"),
        ({"response_format": {"type": "structural_tag", **TAG}}, "tag"),
    ],
)
def test_every_kind_of_form_is_read(values: dict[str, Any], kind: str) -> None:
    spec = read_structured(values)
    assert isinstance(spec, GrammarSpec) and spec.kind == kind


@pytest.mark.parametrize(
    "values",
    [{}, {"guided_json": None}, {"response_format": {"type": "text"}}, {"structured_outputs": {"json_object": False}}],
)
def test_what_asks_for_no_form_is_none(values: dict[str, Any]) -> None:
    assert read_structured(values) is None


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"guided_json": INTEGER, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"json": INTEGER, "choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"jsn": INTEGER}}, "structured_outputs"),
        ({"structured_outputs": {"json": INTEGER, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_choice": [str(i) for i in range(MAX_ENUM_VALUES + 1)]}, "guided_choice"),
        ({"guided_choice": ["\ud800"]}, "guided_choice"),
        ({"guided_choice": ["x" * MAX_SOURCE_BYTES]}, "guided_choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[" * 100_000}, "guided_json"),
        ({"guided_json": {"const": float("nan")}}, "guided_json"),
        ({"guided_json": {"description": "x" * MAX_SOURCE_BYTES}}, "guided_json"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"structural_tag": {"format": {"type": "token", "token": 1}}}}, "structured_outputs"),
    ],
)
def test_what_is_wrong_is_refused_by_the_name_of_its_field(values: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_structured(values)
    message = str(caught.value)
    assert message.startswith(field) and message.isascii() and len(message) < 400


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"not": {}}, "not"),
        ({"if": {}, "then": {}}, "if"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {}}, "contains"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"type": "object", "minProperties": 1}, "minProperties"),
        ({"type": "object", "properties": {"a": {}}, "patternProperties": {"^b": {}}}, "patternProperties"),
        ({"type": "object", "patternProperties": {"a": {}, "b": {}}}, "patternProperties"),
        ({"type": "object", "properties": {"a": {}}, "propertyNames": {"maxLength": 1}}, "propertyNames"),
        ({"type": "string", "pattern": "^[a-z]+$", "minLength": 3, "maxLength": 5}, "maxLength"),
        ({"type": "string", "format": "email", "maxLength": 3}, "maxLength"),
        ({"type": "string", "format": "nonsense"}, "format"),
        ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
        ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "allOf"),
        ({"$ref": "https://example.com/schema"}, "$ref"),
        ({"$defs": {"a": INTEGER}, "$ref": "#/$defs/a", "minimum": 5}, "minimum"),
        ({"anyOf": [INTEGER], "minimum": 5}, "minimum"),
        ({"enum": ["a"], "minLength": 2}, "minLength"),
        ({"type": "object", "properties": {"deep": {"items": {"maxlength": 3}}}}, "maxlength"),
        ({"properties": {"a": {"$id": "x"}}}, "$id"),
    ],
)
def test_a_keyword_that_would_not_be_enforced_is_refused_by_its_name(schema: Any, keyword: str) -> None:
    with pytest.raises(UnsupportedFeature, match="guided_json: keyword") as caught:
        schema_of(schema)
    assert repr(keyword) in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"enum": []},
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"type": "integer", "multipleOf": 7, "minimum": 8, "maximum": 13},
        {"type": "number", "exclusiveMinimum": 1, "maximum": 1},
        {"type": "string", "minLength": 5, "maxLength": 3},
        {"type": "integer", "enum": ["a"]},
        {"type": "object", "required": ["a"], "additionalProperties": False},
        {"type": "object", "properties": {"a": {}}, "minProperties": 2, "additionalProperties": False},
        {"type": "object", "required": ["a", "b"], "maxProperties": 1},
        {"type": "array", "prefixItems": [{}], "items": False, "minItems": 2},
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}, INTEGER]}}},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"$ref": "#/nope"},
        {"type": "intger"},
        5,
    ],
)
def test_what_no_answer_can_meet_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^guided_json: "):
        schema_of(schema)


def test_bounds_of_a_schema_are_checked_before_it_is_compiled() -> None:
    deep: Any = INTEGER
    for _ in range(MAX_DEPTH + 1):
        deep = {"type": "array", "items": deep}
    began_s = time.process_time()  # that of this process alone
    for schema in (deep, {"enum": list(range(MAX_ENUM_VALUES + 1))}, {"enum": [f"v{i}" for i in range(20_000)]}):
        with pytest.raises(InvalidRequest, match=r"^guided_json: "):
            schema_of(schema)
    assert time.process_time() - began_s < 5.0


def test_what_the_library_leaves_open_is_written_out() -> None:
    assert schema_of({"type": "array", "minItems": 2})["items"] == {}
    assert schema_of({"type": "object", "required": ["a"]})["properties"] == {"a": {}}
    assert schema_of({"type": ["integer", "null"], "minimum": 2}) == {
        "anyOf": [{"type": "integer", "minimum": 2}, {"type": "null"}]
    }
    assert schema_of({"type": "integer", "enum": [1, "a"]}) == {"enum": [1]}


@pytest.mark.parametrize(
    "pattern",
    ["(", ")", "[", "\\", "a**", "x{,3}", "a{3,2}", "[]", "[z-a]", "a{1,1000}" * 21, "(a{1,1000}){1,1000}", "*a"],
)
def test_a_broken_or_huge_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^guided_regex: "):
        plain_pattern("guided_regex", pattern)


@pytest.mark.parametrize(
    "pattern",
    ["(?=a)b", "(?<=a)b", "(?!a)b", r"\bfoo", r"(a)\1", "(?i)a", "a^b", "a$b", r"\D", r"[^\d]", r"\p{L}", r"\A"],
)
def test_what_a_pattern_would_not_mean_is_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedFeature, match=r"^guided_regex: "):
        plain_pattern("guided_regex", pattern)


def test_a_pattern_within_json_leaves_out_what_needs_an_escape() -> None:
    assert plain_pattern("p", "[!-#]", in_json=True) == "[!#]"
    with pytest.raises(UnsupportedFeature):
        plain_pattern("p", 'a"b', in_json=True)


def test_a_long_chain_of_references_is_judged_in_a_time_that_grows_with_its_length() -> None:
    def lines(length: int) -> int:
        """Of Python that are run: a count, so that no clock is asked."""
        definitions = {
            str(i): {"type": "array", "minItems": 1, "items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(length)
        }
        schema = {"$ref": "#/$defs/0", "$defs": {**definitions, str(length): {"type": "null"}}}
        count = 0

        def counted(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal count
            count += event == "line"
            return counted

        before = sys.gettrace()
        sys.settrace(counted)
        try:
            assert read_structured({"guided_json": schema}) is not None
        finally:
            sys.settrace(before)
        return count

    assert lines(400) < 5 * lines(100)


@pytest.mark.slow
def test_the_trial_of_a_grammar_goes_on_where_the_answer_could_end() -> None:
    """Each token takes a second; the empty answer is whole already."""
    compiler = Compiler([bytes([byte]) for byte in range(256)], clock=itertools.count().__next__)
    with pytest.raises(GrammarFault, match="ms for a token"):
        compiler.compiled(GrammarSpec("ebnf", 'root ::= s\ns ::= s s s | s s | "a" | ""', "guided_grammar"))
