"""Chat messages → prompt text."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl_backend.errors import InvalidRequest, UnsupportedFeature
from minisgl_backend.text.chat import ChatOptions
from minisgl_backend.text.chat_template import ChatTemplate
from minisgl_backend.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "hi"}
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}


def rendered(source: str, *messages: dict[str, Any]) -> str:
    return ChatTemplate(source, NAMED).render(list(messages) or [USER])


def test_the_models_template_is_found_in_its_folder(byte_level: Tokenizer) -> None:
    assert byte_level.has_chat_template
    assert byte_level.render_chat([USER]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (
        byte_level.render_chat([USER], ChatOptions(add_generation_prompt=False)) == "<|im_start|>user\nhi<|im_end|>\n"
    )


def test_special_tokens_blocks_and_loop_controls_are_as_templates_expect() -> None:
    source = (
        "{{ bos_token }}\n  {% for m in messages %}\n{% if m.role == 'x' %}{% break %}{% endif %}\n"
        "{{ m.content }}\n{% endfor %}"
    )
    assert rendered(source, USER, {"role": "x", "content": "no"}, USER) == "<s>\nhi\n"


def test_json_is_not_escaped_for_html() -> None:
    assert rendered("{{ messages[0] | tojson }}", {"role": "a", "content": "<é>"}) == '{"role": "a", "content": "<é>"}'


def test_the_generation_block_is_its_content() -> None:
    assert rendered("{% for m in messages %}{% generation %}{{ m.content }}!{% endgeneration %}{% endfor %}") == "hi!"


def test_a_template_may_ask_for_the_date() -> None:
    assert len(rendered("{{ strftime_now('%Y') }}")) == 4


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.more }}", "refuses the messages"),
        ("{{ messages[0].content + 3 }}", "TypeError"),
        ("{{ messages[5].content }}", "refuses the messages"),
        ("{% if %}", "broken"),
        ("{{ messages.__class__.__mro__ }}", "refuses the messages"),
        ("{{ messages.append(3) }}", "refuses the messages"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "RecursionError"),
        ("{{ " + "[" * 5000 + " }}", "broken"),
    ],
)
def test_whatever_a_template_does_wrong_names_messages(source: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^messages: .*{says}"):
        rendered(source)


@pytest.mark.parametrize("messages", [[], {}, "hi", None, ["hi"], [{"content": "x"}], [{"role": 3}], [USER, None]])
def test_what_is_not_a_list_of_messages_is_refused(messages: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^messages: "):
        ChatTemplate("x", {}).render(messages)


# ── contents ─────────────────────────────────────────────────────────────────────────────────────────────────────


def part(text: Any, kind: Any = "text") -> dict[str, Any]:
    return {"type": kind, "text": text}


def test_text_parts_are_joined_with_nothing_in_between() -> None:
    message = {"role": "user", "content": [part("a "), part("b"), part("")]}
    assert rendered("{{ messages[0].content }}", message) == "a b"
    assert message["content"] == [part("a "), part("b"), part("")]  # the caller's own is left as it was


def test_a_missing_or_null_content_is_an_empty_one() -> None:
    source = "[{{ messages[0].content + messages[1].content }}]"
    assert rendered(source, {"role": "assistant", "content": None}, {"role": "assistant"}) == "[]"


@pytest.mark.parametrize(
    ("content", "error", "says"),
    [
        ([part("x", "image_url")], UnsupportedFeature, "part 0 of its content has the type 'image_url'; only 'text'"),
        ([part("x"), part("x", "a" * 999)], UnsupportedFeature, "part 1 of its content has the type 'aaaa"),
        ([part(5)], InvalidRequest, "part 0 of its content must have a string `text`"),
        (["x"], InvalidRequest, "part 0 of its content must be an object with a string `type`"),
        ([part("x", None)], InvalidRequest, "part 0 of its content must be an object with a string `type`"),
        (5, InvalidRequest, "content must be a string, null or a list of parts, got 5"),
        ({}, InvalidRequest, "content must be a string, null or a list of parts, got an object"),
        (False, InvalidRequest, "content must be a string, null or a list of parts, got false"),
    ],
)
def test_other_contents_are_refused_with_their_place(content: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        rendered("x", USER, {"role": "user", "content": content})
    message = str(caught.value)
    assert message.startswith("messages: message 1") and says in message and len(message) < 200


def test_the_words_of_a_template_are_told_plain_and_short() -> None:
    with pytest.raises(InvalidRequest) as caught:
        rendered("{{ raise_exception(messages[0].content) }}", {"role": "user", "content": "é\n" * 10_000})
    assert str(caught.value).isascii() and str(caught.value).isprintable() and len(str(caught.value)) < 400
