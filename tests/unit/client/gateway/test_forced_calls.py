from __future__ import annotations

import itertools
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from minisgl_client.gateway.forced import CallReader, forced_form
from minisgl_client.pieces import ToolCall, whole_calls

NAMES = ("weather", "weather_in", 'a "quoted" {name}', "größe")

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
calls = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(), values, max_size=3), st.sampled_from([None, 1])),
    min_size=1,
    max_size=4,
)


def written(name: str, arguments: str) -> str:
    """As the form has a model write it: begin, arguments and end of its function's tag."""
    tool = {"type": "function", "function": {"name": name}}
    (tag,) = forced_form([tool], several=True)["format"]["tags"]
    return f"{tag['begin']}{arguments}{tag['end']}"


@given(calls, st.lists(st.integers(0, 400)), st.booleans())
def test_calls_are_read_the_same_however_their_text_is_cut(
    asked: list[tuple[str, dict[str, Any], int | None]], cuts: list[int], plain: bool
) -> None:
    texts = [(name, json.dumps(value, indent=indent, ensure_ascii=plain)) for name, value, indent in asked]
    text = ", ".join(written(name, arguments) for name, arguments in texts)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    reader = CallReader(NAMES)
    deltas = [delta for begin, end in itertools.pairwise(places) for delta in reader.read(text[begin:end])]
    assert whole_calls(deltas) == tuple(ToolCall(i, name, arguments) for i, (name, arguments) in enumerate(texts))
    assert [delta.index for delta in deltas if delta.name] == list(range(len(texts)))


def test_arguments_come_as_they_are_written_and_a_cut_call_is_cut() -> None:
    reader = CallReader(["weather"])
    assert reader.read('{"name": "wea') == []
    assert reader.read('ther", "arguments": ') == [ToolCall(0, "weather", "")]
    assert reader.read('{"city": "}') == [ToolCall(0, "", '{"city": "}')]


def test_each_functions_schema_stays_a_document_of_its_own() -> None:
    schema = {"$defs": {"City": {"enum": ["Oslo"]}}, "properties": {"city": {"$ref": "#/$defs/City"}}}
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("f", "g")]
    form = forced_form(tools, several=False)["format"]
    assert [tag["content"]["json_schema"] for tag in form["tags"]] == [{"type": "object", **schema}] * 2
    assert form["stop_after_first"] and form["separator"] == ", "


def test_a_function_without_parameters_takes_none() -> None:
    (tag,) = forced_form([{"type": "function", "function": {"name": "now"}}], several=True)["format"]["tags"]
    assert tag["content"]["json_schema"] == {"type": "object", "properties": {}, "additionalProperties": False}
