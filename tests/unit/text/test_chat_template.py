"""Chat messages → prompt text."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl_backend.errors import InvalidRequest
from minisgl_backend.text.chat_template import ChatTemplate
from minisgl_backend.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "hi"}
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}


def rendered(source: str, *messages: dict[str, Any]) -> str:
    return ChatTemplate(source, NAMED).render(list(messages) or [USER])


def test_the_models_template_is_found_in_its_folder(byte_level: Tokenizer) -> None:
    assert byte_level.has_chat_template
    assert byte_level.render_chat([USER]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert byte_level.render_chat([USER], add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


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
        ("{{ messages[0].nothing.more }}", "refuses them"),
        ("{{ messages[0].content + 3 }}", "TypeError"),
        ("{{ messages[5].content }}", "refuses them"),
        ("{% if %}", "broken"),
        ("{{ messages.__class__.__mro__ }}", "refuses them"),
        ("{{ messages.append(3) }}", "refuses them"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "RecursionError"),
    ],
)
def test_whatever_a_template_does_wrong_names_messages(source: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^messages: .*{says}"):
        rendered(source)


@pytest.mark.parametrize("messages", [[], {}, "hi", None, ["hi"], [{"content": "x"}], [{"role": 3}], [USER, None]])
def test_what_is_not_a_list_of_messages_is_refused(messages: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^messages: "):
        ChatTemplate("x", {}).render(messages)
