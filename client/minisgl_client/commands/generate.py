"""`minisgl generate PROMPT`: one answer from a running server, streamed to stdout."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from minisgl_client.commands.asking import Show, add_options, fields_of, refuse_several, show_for
from minisgl_client.errors import ClientError, RequestRefused


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `generate` to the command line."""
    parser = commands.add_parser("generate", help="one answer from a server", description=__doc__.split("\n")[0])
    parser.add_argument(
        "prompt", nargs="?", default="-", help="the text to go on from; - reads it from stdin (default)"
    )
    parser.add_argument("--messages", action="store_true", help="the prompt is a chat: a JSON list of messages")
    parser.add_argument("--no-stream", action="store_true", help="wait for the whole answer")
    add_options(parser, max_tokens=None)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Shows the answer. Raises ClientError, after having shown it."""
    show = show_for(arguments)
    try:
        _answer(arguments, show)
    except ClientError as error:
        show.error(arguments.command, error)
        raise
    return 0


def _answer(arguments: argparse.Namespace, show: Show) -> None:
    from minisgl_client.client import Client

    fields = fields_of(arguments)
    if not arguments.json:
        refuse_several(fields, "more than one answer is shown with --json only")
    prompt = _read() if arguments.prompt == "-" else arguments.prompt
    if arguments.messages:
        fields["messages"], prompt = _messages(prompt), None
    with Client(arguments.url, model=arguments.model) as client:
        pieces = []
        for piece in client.stream(prompt, stream=not arguments.no_stream, **fields):
            pieces.append(piece)
            show.piece(piece)
    show.end(pieces)


def _read() -> str:
    """All of stdin, less one newline at its end."""
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise RequestRefused(f"prompt: stdin is not UTF-8 ({error})") from None


def _messages(prompt: str) -> Any:
    try:
        messages = json.loads(prompt)
    except ValueError as error:
        raise RequestRefused(f"messages: not JSON ({error})") from None
    if not isinstance(messages, list):
        raise RequestRefused(f"messages: must be a JSON list, got {type(messages).__name__}")
    return messages
