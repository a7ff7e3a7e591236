"""A template that a client sent, with limits: whatever it does ends with it, and names `chat_template`."""

from __future__ import annotations

import json
import math
import resource

import pytest

from minisgl_backend.errors import EngineUnavailable, InvalidRequest
from minisgl_backend.text import client_template
from minisgl_backend.text.chat import ChatOptions
from minisgl_backend.text.client_template import MAX_CHARS, render_client_template
from minisgl_backend.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "h\u00e9"}


def refusal(source: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        render_client_template(source, {"messages": [USER]})
    message = str(caught.value)
    assert message.isascii() and len(message) < 400 and message.startswith("chat_template: ")
    return message


def test_it_renders_what_the_models_own_would(byte_level: Tokenizer) -> None:
    arguments = {"greeting": "Gr\u00fc\u00dfe", "odd": [math.inf, 10**30, None]}
    source = "{{ greeting }} {{ messages[0].content }}{{ eos_token }} {{ odd }} {% generation %}x{% endgeneration %}"
    text = byte_level.render_chat([USER], ChatOptions(arguments=arguments, template=source))
    assert text == "Gr\u00fc\u00dfe h\u00e9<|im_end|> [inf, 1000000000000000000000000000000, None] x"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% if %}", "is broken: "),
        ("{{ raise_exception('no') }}", "refuses the messages: no"),
        ("{{ messages[0].content.__class__.x }}", "refuses the messages: access to attribute"),
        ("{% include '/etc/passwd' %}", "can not render the messages (TypeError)"),
        ("{{ '\\ud800' }}", "writes a lone surrogate"),
        ("{% for i in range(99999) %}" + "x" * 50 + "{% endfor %}", f"at most {MAX_CHARS} are taken"),
        ("{{ '%9999999999d' % 1 }}", "can not render the messages (MemoryError)"),
    ],
)
def test_what_is_wrong_with_it_is_said(source: str, says: str) -> None:
    assert says in refusal(source)


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 10 ** (10 ** 9) }}",  # one operation, which nothing in its own process could interrupt
    ],
)
def test_one_that_never_ends_is_ended(source: str) -> None:
    assert refusal(source) == "chat_template: needs more than 2 s or 512 MiB to render the messages"


def test_one_that_no_process_can_be_started_for_may_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_template.sys, "executable", "/nowhere/python")
    with pytest.raises(EngineUnavailable, match=r"^chat_template: there is no room to render it now") as caught:
        render_client_template("x", {})
    assert "/" not in str(caught.value)


def test_the_limits_are_those_of_its_process_alone(byte_level: Tokenizer) -> None:
    before = resource.getrlimit(resource.RLIMIT_AS), resource.getrlimit(resource.RLIMIT_CPU)
    assert json.loads(byte_level.render_chat([USER], ChatOptions(template="{{ messages | tojson }}"))) == [USER]
    assert (resource.getrlimit(resource.RLIMIT_AS), resource.getrlimit(resource.RLIMIT_CPU)) == before
