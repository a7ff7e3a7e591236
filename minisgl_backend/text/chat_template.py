"""Chat messages → the prompt text, by the Jinja template that the model's folder brings.

Where it stands in the flow: held by the Tokenizer; called before a chat is tokenised. The environment is the one
that Hugging Face templates are written for (their documentation "Writing a chat template": trimmed blocks, loop
controls, `raise_exception`, `strftime_now`, an unescaped `tojson`, the `generation` block), in Jinja's immutable
sandbox, since a template is code that came with the weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minisgl_backend.errors import InvalidRequest


class ChatTemplate:
    """One template with the special tokens it may name. Compiled at its first use; rendering changes nothing."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """special_tokens: `bos_token`, `eos_token`, … → their text."""
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._compiled: jinja2.Template | None = None

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt of these messages; with add_generation_prompt it ends where the assistant begins to speak.

        Raises InvalidRequest naming `messages` when they are not messages, and with the template's own words when the
        template refuses them.
        """
        _check_messages(messages)
        try:
            if self._compiled is None:
                self._compiled = _environment().from_string(self._source)
            return self._compiled.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._special_tokens
            )
        except jinja2.TemplateSyntaxError as error:
            raise InvalidRequest("messages", f"the model's chat template is broken: {error.message}") from None
        except jinja2.TemplateError as error:
            raise InvalidRequest("messages", f"the model's chat template refuses them: {error.message}") from None
        except Exception as error:  # the template computes on what the client sent: any error of it is the client's
            kind = type(error).__name__
            raise InvalidRequest("messages", f"the model's chat template can not render them ({kind})") from None


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequest("messages", "must be a list of at least one message")
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequest("messages", f"message {place} must be an object with a string `role`")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as an instance variable

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which would put \\u003c into prompts."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
