"""Chat messages → the prompt text, by the Jinja template that the model's folder brings.

Where it stands in the flow: held by the Tokenizer; called before a chat is tokenised. A template that the client sent
is rendered elsewhere (`text/client_template.py`), with the same functions. The environment is the one
that Hugging Face templates are written for (their documentation "Writing a chat template": trimmed blocks, loop
controls, `raise_exception`, `strftime_now`, an unescaped `tojson`, the `generation` block), in Jinja's immutable
sandbox, since a template is code that came with the weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minisgl_backend.errors import InvalidRequest, UnsupportedFeature
from minisgl_backend.text.chat import PLAIN, ChatOptions, plain_messages


class TemplateFault(Exception):
    """What is wrong with a template, or with what it was given: a clause that follows its name, plain and short."""


class ChatTemplate:
    """The model's own, with the special tokens it may name. Compiled at its first use; rendering changes nothing."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """special_tokens: `bos_token`, `eos_token`, … → their text."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._compiled: jinja2.Template | None = None

    def render(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions = PLAIN) -> str:
        """The prompt of these messages, by this template.

        Raises InvalidRequest or UnsupportedFeature naming the field when they are not messages or the template takes
        no tools, and with the template's own words when it refuses them.
        """
        variables = self.variables(messages, options)
        try:
            if self._compiled is None:
                self._compiled = compile_template(self.source)
            return render_template(self._compiled, variables)
        except TemplateFault as fault:
            raise InvalidRequest("messages", f"the model's chat template {fault}") from None

    def variables(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions = PLAIN) -> dict[str, Any]:
        """What a template may name, whoever wrote it. Raises as `render`."""
        given = options.arguments or {}
        ours = {
            "messages": plain_messages(messages),
            "add_generation_prompt": options.add_generation_prompt and not options.continue_final_message,
            "tools": list(options.tools) or None,
            **self._special_tokens,
        }
        for name in (*ours, *_OWN_NAMES):
            if name in given:
                raise InvalidRequest("chat_template_kwargs", f"must not name {name!a}, which is set by the server")
        if options.tools and not _TOOLS.search(self.source if options.template is None else options.template):
            raise UnsupportedFeature("tools", "the chat template takes none")
        return {**given, **ours}


def compile_template(source: str) -> jinja2.Template:
    """Raises TemplateFault."""
    try:
        return _environment().from_string(source)
    except jinja2.TemplateError as error:
        raise TemplateFault(f"is broken: {_words(error)}") from None
    except Exception as error:  # of Python's own compiler, for what is nested too deeply
        raise TemplateFault(f"is broken ({type(error).__name__})") from None


def render_template(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Raises TemplateFault."""
    try:
        return template.render(variables)
    except jinja2.TemplateError as error:
        raise TemplateFault(f"refuses the messages: {_words(error)}") from None
    except Exception as error:  # it computes on what the client sent: any error of it is the client's
        raise TemplateFault(f"can not render the messages ({type(error).__name__})") from None


_TOOLS = re.compile(r"\btools\b")

_OWN_NAMES = ("continue_final_message", "chat_template", "raise_exception", "strftime_now")
"""What a template argument must not stand in for, beside the messages and the special tokens."""


def _words(error: jinja2.TemplateError) -> str:
    """The template's own words, which may quote the client at any length."""
    return ascii(error.message or "")[1:-1][:300]


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
