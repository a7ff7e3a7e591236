"""Reasoning and tool calls in an answer, whatever pieces its text comes in."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl_backend.text.parsers.answer import TOOL_PARSERS, AnswerParser, reasoning_parser_of, tool_parser_of
from minisgl_backend.text.parsers.events import Content, Event, Reasoning, ToolCall, Whole, join

WEATHER = '{"city": "Zürich", "days": [1, 2], "note": "a } \\" ] b"}'


def read(pieces: list[str], tools: str = "", *, reasoning: bool = False, opened: bool = False) -> list[Event]:
    parser = AnswerParser(reasoning=reasoning, opened=opened, tools=tools)
    events = [event for piece in pieces for event in parser.push(piece)]
    return [*events, *parser.finish()]


def whole(text: str, tools: str = "", *, reasoning: bool = False, opened: bool = False) -> Whole:
    """The events of a text, the same in one piece, in single characters and cut in two anywhere."""
    result = join(read([text], tools, reasoning=reasoning, opened=opened))
    cuts = [[text[:at], text[at:]] for at in range(1, len(text))]
    for pieces in ([*text], *cuts):
        events = read(list(pieces), tools, reasoning=reasoning, opened=opened)
        assert join(events) == result, pieces
    return result


@pytest.mark.parametrize(
    ("text", "thought", "said"),
    [
        (" <think>a<b</think>c", "a<b", "c"),
        ("<think>\nfirst\n\nthen\n</think>\n\nThe answer.\n", "first\n\nthen", "The answer.\n"),
        ("<think>never ends </thin", "never ends </thin", ""),
        ("<think></think>c", "", "c"),
        ("no <think>tag</think> in front", "", "no <think>tag</think> in front"),
        ("  <thin", "", "  <thin"),
        ("\n plain", "", "\n plain"),
        (" " * 256 + "<think>a</think>b", "a", "b"),
        (" " * 257 + "<think>a</think>b", "", " " * 257 + "<think>a</think>b"),
        ("<think>a</think><think>b</think>", "a", "<think>b</think>"),
        ("", "", ""),
    ],
)
def test_reasoning_stands_between_tags_at_the_beginning(text: str, thought: str, said: str) -> None:
    assert whole(text, reasoning=True) == Whole(thought, said, ())


def test_a_prompt_that_opens_the_tag_makes_the_answer_begin_inside() -> None:
    assert whole("so\n</think>\nyes", reasoning=True, opened=True) == Whole("so", "yes", ())
    assert whole("so it is", reasoning=True, opened=True) == Whole("so it is", "", ())


def test_reasoning_streams_as_it_comes() -> None:
    parser = AnswerParser(reasoning=True, opened=False, tools="")
    assert parser.push("<think>one") == [Reasoning("one")]
    assert parser.push(" two<") == [Reasoning(" two")]
    assert parser.push("3") == [Reasoning("<3")]
    assert parser.push("</think>x") == [Content("x")]


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        (
            'I look.\n<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>'.replace("%s", WEATHER),
            "I look.",
            (("weather", WEATHER),),
        ),
        (
            '<tool_call>{"name": "a", "arguments": {}}</tool_call>\n'
            '<tool_call>{"arguments": [1], "name": "b"}</tool_call>\ndone',
            "done",
            (("a", "{}"), ("b", "[1]")),
        ),
        ('<tool_call>{"name": "a"}</tool_call>', "", (("a", "{}"),)),
        ('<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>', "", (("a", '{"x": 1}'),)),
        ('<tool_call>{"id": {"x": "}"}, "name": "a", "arguments": 5 }</tool_call>', "", (("a", "5 "),)),
        ('<tool_call>{"name": "a", "arguments": {"x": [1,', "", (("a", '{"x": [1,'),)),
        ('<tool_call>{"name": "a", "arguments": {}} and no closing tag', "and no closing tag", (("a", "{}"),)),
        ('so <tool_call>{"na', 'so <tool_call>{"na', ()),
        ("the tag <tool_call> is a word", "the tag <tool_call> is a word", ()),
        ("a <tool_call>[1]</tool_call> b", "a <tool_call>[1]</tool_call> b", ()),
        ('<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', ()),
        ("1 <tool_cal", "1 <tool_cal", ()),
        ("words \n\n", "words \n\n", ()),
        ('<tool_call> <tool_call>{"name": "a", "arguments": {}}</tool_call>', "<tool_call>", (("a", "{}"),)),
    ],
)
def test_hermes_calls(text: str, said: str, calls: tuple[tuple[str, str], ...]) -> None:
    assert whole(text, "hermes") == Whole("", said, calls)


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ('{"name": "weather", "parameters": %s}'.replace("%s", WEATHER), "", (("weather", WEATHER),)),
        (
            '<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {"x": 1}}',
            "",
            (("a", "{}"), ("b", '{"x": 1}')),
        ),
        ('\n{"type": "function", "name": "a", "parameters": {}}\n', "", (("a", "{}"),)),
        ('{"answer": 42} is JSON', '{"answer": 42} is JSON', ()),
        ("{braces} in words", "{braces} in words", ()),
        ('words, then {"name": "a", "parameters": {}}', 'words, then {"name": "a", "parameters": {}}', ()),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", ()),
        ("<|pyth", "<|pyth", ()),
        ('{"name": "a", "parameters": {}} and words', "and words", (("a", "{}"),)),
        ("", "", ()),
    ],
)
def test_llama3_calls(text: str, said: str, calls: tuple[tuple[str, str], ...]) -> None:
    assert whole(text, "llama3") == Whole("", said, calls)


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        (
            '[TOOL_CALLS] [{"name": "weather", "arguments": %s}, {"name": "b", "arguments": {}}]'.replace(
                "%s", WEATHER
            ),
            "",
            (("weather", WEATHER), ("b", "{}")),
        ),
        ("Let me see.\n[TOOL_CALLS]weather[ARGS]%s".replace("%s", WEATHER), "Let me see.", (("weather", WEATHER),)),
        ('[TOOL_CALLS]a[CALL_ID]123[ARGS]{}[TOOL_CALLS]b[ARGS]{"x": "]}"}', "", (("a", "{}"), ("b", '{"x": "]}"}'))),
        ('[TOOL_CALLS][{"name": "a", "arguments": {"x":', "", (("a", '{"x":'),)),
        ("[TOOL_CALLS] [hello]", "[TOOL_CALLS] [hello]", ()),
        ("[TOOL_CALLS]two\nlines", "[TOOL_CALLS]two\nlines", ()),
        ("[TOOL_CALLS]" + "n" * 300 + "[ARGS]{}", "[TOOL_CALLS]" + "n" * 300 + "[ARGS]{}", ()),
        ("[TOOL_CALLS]" + "n" * 243 + "[ARGS]{}", "", (("n" * 243, "{}"),)),
        ("[TOOL_CALLS][TOOL_CALLS]a[ARGS]{}", "[TOOL_CALLS][TOOL_CALLS]a[ARGS]{}", ()),  # no list of calls
        ("a [TOOL", "a [TOOL", ()),
        ("[TOOL_CALLS]nam", "[TOOL_CALLS]nam", ()),
    ],
)
def test_mistral_calls(text: str, said: str, calls: tuple[tuple[str, str], ...]) -> None:
    assert whole(text, "mistral") == Whole("", said, calls)


@pytest.mark.parametrize("tools", sorted(TOOL_PARSERS))
def test_text_without_marks_is_content_character_for_character(tools: str) -> None:
    assert whole("  Über [1] <b> {2}\n\n", tools) == Whole("", "  Über [1] <b> {2}\n\n", ())


def test_a_call_is_told_of_before_its_arguments_are_whole() -> None:
    parser = AnswerParser(reasoning=False, opened=False, tools="hermes")
    assert parser.push('<tool_call>{"name": "f", "arguments": {"a"') == [ToolCall(0, "f", '{"a"')]
    assert parser.push(": 1") == [ToolCall(0, "", ": 1")]


def test_calls_behind_reasoning_are_read_and_those_inside_it_are_not() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    read_whole = whole(f"<think>{call}</think>{call}", "hermes", reasoning=True)
    assert read_whole == Whole(call, "", (("f", "{}"),))


PARTS = st.sampled_from(
    [*"{}[]\":,; \n\\a1<", "<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
     "<|python_tag|>", '{"name": "f", "arguments": ', '"parameters": {', '"name"', '"f"', '{"x": "', "<tool", "[T"]
)  # fmt: skip


@given(
    text=st.lists(PARTS, max_size=30).map("".join),
    tools=st.sampled_from(["", *sorted(TOOL_PARSERS)]),
    reasoning=st.booleans(),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_any_cutting_gives_the_same(text: str, tools: str, reasoning: bool, cuts: list[int]) -> None:
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[low:high] for low, high in itertools.pairwise(borders)]
    one = join(read([text], tools, reasoning=reasoning))
    assert join(read(pieces, tools, reasoning=reasoning)) == one
    assert join(read([*text], tools, reasoning=reasoning)) == one


@pytest.mark.parametrize("tools", sorted(TOOL_PARSERS))
def test_the_work_for_a_piece_does_not_grow_with_the_answer(tools: str) -> None:
    """What a parser holds stays small, wherever in an answer it stands."""
    begin = {"hermes": '<tool_call>{"name": "f", "arguments": {"x": "', "llama3": '{"name": "f", "parameters": {"x": "'}
    parser = AnswerParser(reasoning=True, opened=False, tools=tools)
    parser.push(begin.get(tools, '[TOOL_CALLS]f[ARGS]{"x": "'))
    for _ in range(2_000):
        assert parser.push("word ") == [ToolCall(0, "", "word ")]
    assert list(parser.push('"}')) == [ToolCall(0, "", '"}')]


def test_the_parser_is_known_by_the_marks_of_a_template() -> None:
    assert tool_parser_of("{{ '<tool_call>' }}") == "hermes"
    assert tool_parser_of("[TOOL_CALLS]") == "mistral"
    assert tool_parser_of("<|python_tag|>") == "llama3"
    assert tool_parser_of("{{ messages }}") == ""
    assert reasoning_parser_of("<think>\n") == "think"
    assert reasoning_parser_of("plain") == ""


def test_arguments_that_are_json_stay_json() -> None:
    calls = whole('<tool_call>{"name": "weather", "arguments": %s}</tool_call>'.replace("%s", WEATHER), "hermes").calls
    assert json.loads(calls[0][1]) == json.loads(WEATHER)
