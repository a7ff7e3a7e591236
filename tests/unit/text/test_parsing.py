"""parse_output: how a request asks for it, and what its record makes of scripted tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fakes.chat_templates import HERMES
from fakes.text_requests import validate_request
from fakes.tokenizers import byte_level_folder, ids_of_bytes
from minisgl_backend.config import PARSERS
from minisgl_backend.errors import InvalidRequest, UnsupportedFeature
from minisgl_backend.messages.client import Chunk, Finished, Request
from minisgl_backend.messages.engine import EndReason
from minisgl_backend.messages.ids import RequestId
from minisgl_backend.messages.sampling import Grammar
from minisgl_backend.text.limits import RequestLimits
from minisgl_backend.text.parsers.answer import REASONING_PARSERS, TOOL_PARSERS, AnswerParser
from minisgl_backend.text.parsers.events import Event
from minisgl_backend.text.parsing import parser_names
from minisgl_backend.text.record import Record
from minisgl_backend.text.request import check_request, tokenise
from minisgl_backend.text.tokenizer import Tokenizer

LIMITS = RequestLimits(context_tokens=4096, pool_tokens=4096, reasoning_parser="think", tool_parser="hermes")
PLAIN = RequestLimits(context_tokens=4096, pool_tokens=4096)
CHAT = [{"role": "user", "content": "hi"}]
TOOLS = json.dumps([{"type": "function", "function": {"name": "f"}}]).encode()
OPENING = HERMES + "{% if add_generation_prompt %}<think>\n{% endif %}"

Told = tuple[str, str, list[dict[str, Any]]]
"""Content, reasoning, calls."""


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(byte_level_folder(tmp_path_factory.mktemp("hermes"), chat_template=HERMES))


@pytest.fixture(scope="module")
def opening(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Its generation prompt ends inside the tag."""
    return Tokenizer.load(byte_level_folder(tmp_path_factory.mktemp("opening"), chat_template=OPENING))


def asked(messages: Any = CHAT, *, stream: bool = True, tools: bytes = TOOLS, **parameters: Any) -> Request:
    raw = json.dumps({"max_tokens": 1000, **parameters}).encode()
    return Request(
        RequestId(1), None, raw, stream, None, messages=json.dumps(messages).encode(), tools=tools, parse_output=True
    )


def pieces(
    tokenizer: Tokenizer, request: Request, ids: list[int], limits: RequestLimits = LIMITS
) -> list[Chunk | Finished]:
    """The outputs, a token per step."""
    record = Record(request.id, validate_request(request, tokenizer, limits, lambda: 0), tokenizer, 0.0)
    outputs: list[Any] = []
    for token in ids:
        record.on_token(token)
        outputs += record.take_outputs()
    record.on_end(EndReason.LENGTH)
    outputs += record.take_outputs()
    return outputs


def told(outputs: list[Chunk | Finished]) -> Told:
    """All pieces joined; the deltas of calls are whole calls again."""
    calls: list[dict[str, Any]] = []
    for output in outputs:
        for delta in json.loads(output.tool_calls or b"[]"):
            if "index" not in delta:
                calls.append(delta)
                continue
            if "name" in delta:
                assert delta["index"] == len(calls)
                calls.append({"name": delta["name"], "arguments": ""})
            calls[delta["index"]]["arguments"] += delta["arguments"]
    return "".join(o.text for o in outputs), "".join(o.reasoning for o in outputs), calls


ANSWER = '<think>\nIt is é.\n</think>\n\nSo: <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
READ: Told = ("So:", "It is é.", [{"name": "f", "arguments": '{"a": 1}'}])


def test_ct_06_tags_that_tokens_cut_anywhere_are_found_and_never_shown(hermes: Tokenizer) -> None:
    """A token per byte: each tag is cut at every place."""
    ids = ids_of_bytes(hermes, ANSWER.encode())
    outputs = pieces(hermes, asked(), ids)
    assert told(outputs) == READ
    assert all("<" not in output.text + output.reasoning for output in outputs)
    assert told(pieces(hermes, asked(stream=False), ids)) == READ
    assert isinstance(outputs[-1], Finished) and [type(output) for output in outputs].count(Finished) == 1


@pytest.mark.parametrize("cut", range(1, len(ANSWER.encode())))
def test_two_pieces_cut_anywhere_say_the_same(hermes: Tokenizer, cut: int) -> None:
    ids = ids_of_bytes(hermes, ANSWER.encode())
    record = Record(RequestId(1), validate_request(asked(), hermes, LIMITS, lambda: 0), hermes, 0.0)
    outputs: list[Any] = []
    for part in (ids[:cut], ids[cut:]):
        for token in part:
            record.on_token(token)
        outputs += record.take_outputs()
    record.on_end(EndReason.STOP)
    assert told([*outputs, *record.take_outputs()]) == READ


@pytest.mark.parametrize("more", [{}, {"stop": "never"}], ids=["plain", "stop string"])
def test_a_long_answer_that_is_not_streamed_is_parsed_as_it_comes_and_not_at_its_end(
    hermes: Tokenizer, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[int] = []
    push = AnswerParser.push

    def counted(self: AnswerParser, text: str) -> list[Event]:
        parsed.append(len(text))
        return push(self, text)

    monkeypatch.setattr(AnswerParser, "push", counted)
    calls = "".join(f'<tool_call>{{"name": "f{i}", "arguments": {{"a": "{"é" * i}"}}}}</tool_call>' for i in range(60))
    text = f"<think>{'thought ' * 50}</think>{'words ' * 90}{calls} \xe9".encode()[:-1]  # ends within a character
    ids = ids_of_bytes(hermes, text)
    streamed = told(pieces(hermes, asked(**more), ids))
    parsed.clear()
    assert told(pieces(hermes, asked(stream=False, **more), ids)) == streamed
    assert max(parsed) < 300 and sum(parsed) > 4000
    assert len(streamed[2]) == 60 and streamed[0].endswith("\ufffd")


def test_a_stream_tells_a_call_in_deltas_and_else_it_is_whole(hermes: Tokenizer) -> None:
    ids = ids_of_bytes(hermes, b'<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    deltas = [json.loads(output.tool_calls) for output in pieces(hermes, asked(), ids) if output.tool_calls]
    assert deltas[0] == [{"index": 0, "name": "f", "arguments": "{"}] and deltas[1] == [{"index": 0, "arguments": "}"}]
    (whole,) = pieces(hermes, asked(stream=False), ids)
    assert json.loads(whole.tool_calls) == [{"name": "f", "arguments": "{}"}]


@pytest.mark.parametrize("stream", [True, False])
def test_st_07_a_stop_string_in_the_thinking_ends_the_answer_and_leaks_no_tag(hermes: Tokenizer, stream: bool) -> None:
    ids = ids_of_bytes(hermes, b"<think>Is 7.9 more?</think>7.9 is")
    outputs = pieces(hermes, asked(stream=stream, stop=["7.9"]), ids)
    assert told(outputs) == ("", "Is", []) and outputs[-1].reason == "stop"
    outputs = pieces(hermes, asked(stream=stream, stop=["</think>"]), ids)
    assert told(outputs) == ("", "Is 7.9 more?", []) and outputs[-1].reason == "stop"


def test_each_of_several_answers_is_read_by_itself(hermes: Tokenizer) -> None:
    request = asked(stream=False, n=2)
    record = Record(request.id, validate_request(request, hermes, LIMITS, lambda: 0), hermes, 0.0)
    for token in ids_of_bytes(hermes, b"<think>a</think>b"):
        record.on_token(token, 0)
    for token in ids_of_bytes(hermes, b"c</think>"):
        record.on_token(token, 1)
    record.on_end(EndReason.STOP, 0)
    record.on_end(EndReason.STOP, 1)
    first, second = record.take_outputs()
    assert isinstance(first, Chunk) and isinstance(second, Finished)
    assert [(o.text, o.reasoning) for o in (first, second)] == [("b", "a"), ("c</think>", "")]


def test_a_prompt_that_ends_inside_the_tag_makes_the_answer_begin_there(hermes: Tokenizer, opening: Tokenizer) -> None:
    ids = ids_of_bytes(hermes, b"hm</think>yes")
    assert told(pieces(opening, asked(), ids)) == ("yes", "hm", [])
    assert told(pieces(hermes, asked(), ids)) == ("hm</think>yes", "", [])
    assert told(pieces(opening, asked(add_generation_prompt=False), ids)) == ("hm</think>yes", "", [])


@pytest.mark.parametrize(
    ("content", "opened"),
    [("<think>so ", True), ("<think>", True), ("<think>so</think> y", False), ("y <think> z", False), ("y", False)],
)
def test_a_message_that_goes_on_may_be_inside_the_tag(hermes: Tokenizer, content: str, opened: bool) -> None:
    chat = [*CHAT, {"role": "assistant", "content": content}]
    outputs = pieces(hermes, asked(chat, continue_final_message=True), ids_of_bytes(hermes, b"hm</think>yes"))
    assert told(outputs) == (("yes", "hm", []) if opened else ("hm</think>yes", "", []))


class Read(bytes):
    """Counts how often it is read."""

    times = 0

    def decode(self, *how: str) -> str:
        self.times += 1
        return bytes(self).decode(*how)


def test_the_messages_of_an_answer_that_goes_on_and_is_parsed_are_read_once(hermes: Tokenizer) -> None:
    request = asked([*CHAT, {"role": "assistant", "content": "<think>so "}], continue_final_message=True)
    assert request.messages is not None
    messages = Read(request.messages)
    got = validate_request(msgspec.structs.replace(request, messages=messages), hermes, LIMITS, lambda: 0)
    assert got.parsing is not None and got.parsing.opened
    assert messages.times == 1


@pytest.mark.parametrize("content", ["what is <think>", "<think>"])
def test_a_tag_that_the_user_wrote_opens_nothing(hermes: Tokenizer, content: str) -> None:
    chat = [{"role": "user", "content": content}]
    assert told(pieces(hermes, asked(chat), ids_of_bytes(hermes, b"hm"))) == ("hm", "", [])


def test_without_tools_calls_are_words(hermes: Tokenizer) -> None:
    words = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for tools in (b"", b"[]", b"null"):
        assert told(pieces(hermes, asked(tools=tools), ids_of_bytes(hermes, words.encode()))) == (words, "", [])


def test_special_tokens_of_the_parser_reach_it_and_no_others_are_shown(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path, chat_template=HERMES)
    path = folder / "tokenizer.json"
    spec = json.loads(path.read_text())
    first = len(spec["model"]["vocab"])
    call, image, think, thought = ids = [first + place for place in range(4)]
    for text, i in zip(("[TOOL_CALLS]", "[IMG]", "<think>", "</think>"), ids, strict=True):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        spec["added_tokens"].append({"id": i, "content": text, "special": True, **flags})
    path.write_text(json.dumps(spec))
    tokenizer = Tokenizer.load(folder)
    limits = msgspec.structs.replace(LIMITS, tool_parser="mistral")
    a, b = ids_of_bytes(tokenizer, b"ab")
    ids = [think, a, thought, b, image, call, *ids_of_bytes(tokenizer, b'[{"name": "f", "arguments": {}}]')]
    for stream in (True, False):
        assert told(pieces(tokenizer, asked(stream=stream), ids, limits)) == (
            "b",
            "a",
            [{"name": "f", "arguments": "{}"}],
        )
    content, reasoning, calls = told(pieces(tokenizer, asked(tools=b""), ids, limits))
    assert (content, reasoning, calls) == ('b[{"name": "f", "arguments": {}}]', "a", [])
    assert tokenizer.shown_bytes[call] == b"", "others' answers hide it as before"


def test_it_is_refused_without_messages_and_without_a_parser(hermes: Tokenizer) -> None:
    text = Request(RequestId(1), b"hi", b"", True, None, parse_output=True)
    with pytest.raises(InvalidRequest, match=r"^parse_output: needs messages"):
        check_request(text, hermes, LIMITS)
    with pytest.raises(UnsupportedFeature, match=r"^parse_output: this model has no parser"):
        check_request(asked(), hermes, PLAIN)


def test_a_form_that_would_begin_inside_the_reasoning_is_refused(hermes: Tokenizer, opening: Tokenizer) -> None:
    grammar = Grammar(b"key", b"compiled", b"")
    checked = check_request(asked(), opening, LIMITS)
    with pytest.raises(InvalidRequest, match=r"^parse_output: .*structured output"):
        tokenise(checked, opening, LIMITS, lambda: 0, grammar)
    assert tokenise(check_request(asked(), hermes, LIMITS), hermes, LIMITS, lambda: 0, grammar).parsing is not None


def test_settings_name_the_parsers_there_are_and_auto_asks_the_template() -> None:
    assert {"reasoning_parser": REASONING_PARSERS, "tool_parser": tuple(TOOL_PARSERS)} == PARSERS
    assert parser_names("auto", "auto", OPENING) == ("think", "hermes")
    assert parser_names("auto", "auto", "") == ("", "")
    assert parser_names("none", "none", OPENING) == ("", "")
    assert parser_names("think", "mistral", "") == ("think", "mistral")
