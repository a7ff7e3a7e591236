"""What `minisgl generate` and `minisgl chat` share: options of a request, and how an answer is shown.

Imports nothing of gRPC, so that the command line answers `--help` at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any, Protocol

from minisgl_client.errors import ClientError
from minisgl_client.pieces import Piece, total


def add_options(parser: argparse.ArgumentParser, *, max_tokens: int | None) -> None:
    """Options of both commands. max_tokens: the default; None leaves it to the server."""
    add = parser.add_argument
    add("--url", default="127.0.0.1:8001", metavar="HOST:PORT", help="gRPC of the server (%(default)s)")
    add("--model", default="minisgl", help="the model's name there (%(default)s)")
    add("--max-tokens", type=int, default=max_tokens, metavar="N", help="tokens of an answer at most")
    add("--temperature", type=float, metavar="X", help="0 always takes the likeliest token")
    add("--top-p", type=float, metavar="X")
    add("--top-k", type=int, metavar="N")
    add("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    add("--set", type=_setting, action="append", default=[], metavar="KEY=VALUE", help="any sampling parameter")
    add("--timeout", type=float, metavar="SECONDS", help="an answer that takes longer is given up")
    add("--json", action="store_true", help="events as JSON lines on stdout (docs/client.md)")


def fields_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of a request that were given."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed")
    fields = {name: getattr(arguments, name) for name in names} | dict(arguments.set)
    fields["timeout_s"] = arguments.timeout
    fields["return_usage"] = arguments.json  # nobody else sees it, and a neighbour of another contract may not have it
    return {name: value for name, value in fields.items() if value is not None}


NO_PARAMETERS = frozenset(
    (
        *("text", "stream", "messages", "tools", "input_ids", "timeout_s", "request_id"),
        *("parse_output", "return_output_ids", "return_cumulative_logprob", "return_usage"),
    )
)
"""What a request says beside its sampling parameters, by the names of `Client.stream`: the options' affair."""


class Show(Protocol):
    """Where the events of an answer go."""

    def piece(self, piece: Piece) -> None: ...

    def end(self, pieces: list[Piece], *, stopped: bool = False) -> None: ...  # stopped: by Ctrl-C

    def error(self, command: str, error: ClientError) -> None: ...


class ShowText:
    """The text on stdout as it comes, errors as a line on stderr."""

    def __init__(self) -> None:
        self._in_line = False

    def piece(self, piece: Piece) -> None:
        """Without delay."""
        sys.stdout.write(piece.text)
        sys.stdout.flush()
        if piece.text:
            self._in_line = not piece.text.endswith("\n")

    def end(self, pieces: list[Piece], *, stopped: bool = False) -> None:
        """Closes the line, in which the terminal may have written ^C."""
        if self._in_line or stopped:
            print(flush=True)
        self._in_line = False

    def error(self, command: str, error: ClientError) -> None:
        """The text that came stays."""
        self.end([])
        print(error_line(command, error), file=sys.stderr, flush=True)


class ShowEvents:
    """One JSON object a line on stdout: {"event": "piece" | "answer" | "error", …}."""

    def piece(self, piece: Piece) -> None:
        """As it comes."""
        self._put("piece", text=piece.text, finish_reason=piece.finish_reason, usage=dataclasses.asdict(piece.usage))

    def end(self, pieces: list[Piece], *, stopped: bool = False) -> None:
        """The whole answer; its reason is "cancelled" when it was stopped here."""
        reason = "cancelled" if stopped else pieces[-1].finish_reason
        usage = dataclasses.asdict(total([piece.usage for piece in pieces]))
        self._put("answer", text="".join(piece.text for piece in pieces), finish_reason=reason, usage=usage)

    def error(self, command: str, error: ClientError) -> None:
        """On stderr too, for who watches."""
        self._put("error", kind=type(error).__name__, status=error.status, message=str(error))
        print(error_line(command, error), file=sys.stderr, flush=True)

    def _put(self, event: str, **members: Any) -> None:
        print(json.dumps({"event": event, **members}), flush=True)


def show_for(arguments: argparse.Namespace) -> Show:
    """As --json says."""
    if not arguments.json and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows no Chinese shall not end a Chinese answer
    return ShowEvents() if arguments.json else ShowText()


def error_line(command: str, error: ClientError) -> str:
    """One line, whatever the server wrote."""
    return f"minisgl {command}: {' '.join(str(error).split())} ({error.status})"


def _setting(text: str) -> tuple[str, Any]:
    """KEY=VALUE; the value is JSON, or else a string."""
    key, separator, value = text.partition("=")
    if not (key and separator):
        raise argparse.ArgumentTypeError(f"must look like key=value, got {text!r}")
    if key in NO_PARAMETERS:
        raise argparse.ArgumentTypeError(f"{key!r} is no sampling parameter")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value
