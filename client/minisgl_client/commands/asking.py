"""What `minisgl generate` and `minisgl chat` share: options of a request, and how an answer is shown.

Imports nothing of gRPC, so that the command line answers `--help` at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, Protocol, TextIO

from minisgl_client.errors import ClientError, RequestRefused
from minisgl_client.pieces import Answer, Piece, whole_calls


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
    add("--tools", type=_tools, metavar="FILE", help="a JSON list of functions a chat may call; implies --parse-output")
    add("--parse-output", action="store_true", help="reasoning and tool calls of a chat's answer apart from its text")
    add("--timeout", type=float, metavar="SECONDS", help="an answer that takes longer is given up")
    add("--json", action="store_true", help="events as JSON lines on stdout (docs/client.md)")


def fields_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of a request that were given."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed")
    fields = {name: getattr(arguments, name) for name in names} | dict(arguments.set)
    fields["tools"] = arguments.tools
    fields["parse_output"] = arguments.parse_output or arguments.tools is not None or None
    fields["timeout_s"] = arguments.timeout
    fields["return_usage"] = arguments.json  # nobody else sees it, and a neighbour of another contract may not have it
    return {name: value for name, value in fields.items() if value is not None}


def refuse_several(fields: dict[str, Any], why: str) -> None:
    """Where nobody would see more than one answer. Raises RequestRefused."""
    if fields.get("n", 1) not in (1, "1"):
        raise RequestRefused(f"n: {why}, got {fields['n']}")


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
    """The text on stdout as it comes; reasoning, the calls of tools and errors on stderr."""

    def __init__(self) -> None:
        self._line: TextIO | None = None  # where the last character ended no line

    def piece(self, piece: Piece) -> None:
        """Without delay."""
        self._write(sys.stderr, piece.reasoning)
        self._write(sys.stdout, piece.text)

    def end(self, pieces: list[Piece], *, stopped: bool = False) -> None:
        """Closes the line, in which the terminal may have written ^C."""
        if self._line is not None or stopped:
            print(file=self._line or sys.stdout, flush=True)
        self._line = None
        for call in whole_calls(call for piece in pieces for call in piece.tool_calls):
            print(f"call: {call.name} {call.arguments}", file=sys.stderr, flush=True)

    def error(self, command: str, error: ClientError) -> None:
        """The text that came stays."""
        self.end([])
        print(error_line(command, error), file=sys.stderr, flush=True)

    def _write(self, out: TextIO, text: str) -> None:
        if not text:
            return
        if self._line not in (None, out):
            print(file=self._line, flush=True)
        out.write(text)
        out.flush()
        self._line = None if text.endswith("\n") else out


class ShowEvents:
    """One JSON object a line on stdout: {"event": "piece" | "answer" | "error", …}. What a piece or an answer has is
    told by the client's own names; beside text, finish_reason and usage only what there is.
    """

    def piece(self, piece: Piece) -> None:
        """As it comes."""
        self._put("piece", **_told(piece))

    def end(self, pieces: list[Piece], *, stopped: bool = False) -> None:
        """The whole answer; its reason is "cancelled" when it was stopped here."""
        self._put("answer", **_told(Answer.of(pieces, stopped="cancelled" if stopped else None)))

    def error(self, command: str, error: ClientError) -> None:
        """On stderr too, for who watches."""
        self._put("error", kind=type(error).__name__, status=error.status, message=str(error))
        print(error_line(command, error), file=sys.stderr, flush=True)

    def _put(self, event: str, **members: Any) -> None:
        print(json.dumps({"event": event, **members}), flush=True)


def _told(one: Piece | Answer) -> dict[str, Any]:
    members = dataclasses.asdict(one)
    return {
        name: value
        for name, value in members.items()
        if name in ("text", "finish_reason", "usage") or value not in (None, "", ())
    }


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


def _tools(path: str) -> Any:
    """The JSON in a file; what it says is the server's to judge."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path!r} is no file of JSON ({error})") from None
