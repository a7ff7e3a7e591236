"""`minisgl chat`: a conversation with a running server.

    prompt ─► line ─► command, or the user's turn ─► answer, streamed ─► both turns are the history
       ▲                                              │ Ctrl-C: cancelled there; what was said is the turn
       └──────────────────────────────────────────────┘ an error: as if the turn had not been

Where an answer calls tools (--tools), the next lines are their results, one each, in the order of the calls. Reasoning
is no part of the history.

On a terminal with a prompt and an editable line. Else each line of stdin is a turn, and the first error ends it.
"""

from __future__ import annotations

import argparse
import io
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING, Any

from minisgl_client.commands.asking import Show, add_options, fields_of, refuse_several, show_for
from minisgl_client.errors import Cancelled, ClientError
from minisgl_client.pieces import Piece, ToolCall, whole_calls

if TYPE_CHECKING:
    from minisgl_client.client import Client

_HELP = """\
/reset   forget the conversation
/help    this list
/exit    leave; so does Ctrl-D, or Ctrl-C twice
Ctrl-C   stops an answer; what was said stays in the conversation"""

_PROMPT = "> "


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `chat` to the command line."""
    parser = commands.add_parser("chat", help="talk to a server", description=__doc__.split("\n")[0])
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    add_options(parser, max_tokens=512)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Talks until the end of input or /exit. Raises ClientError when it is not a person who talks."""
    from minisgl_client.client import Client

    signal.signal(signal.SIGTERM, _leave)  # at the prompt, a Ctrl-C would only give a hint
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # what is no UTF-8 is refused as part of a message
    fields, show = fields_of(arguments), show_for(arguments)
    try:
        refuse_several(fields, "a conversation goes on with one answer")
    except ClientError as error:
        show.error("chat", error)
        raise
    with Client(arguments.url, model=arguments.model) as client:
        conversation = Conversation(client, arguments.system, fields, show)
        if not sys.stdin.isatty():
            for line in sys.stdin:
                if not conversation.take(line.rstrip("\n")):
                    break
            return 0
        return _talk(conversation, prompts=not arguments.json)


class Conversation:
    """The history, and what a line does to it."""

    def __init__(self, client: Client, system: str | None, fields: dict[str, Any], show: Show) -> None:
        self._client = client
        self._fields = fields
        self._show = show
        self._beginning = [] if system is None else [{"role": "system", "content": system}]
        self._messages: list[dict[str, Any]] = list(self._beginning)
        self._open: list[str] = []  # names of calls whose results have not come

    @property
    def prompt(self) -> str:
        """What the next line is asked for with."""
        return f"result of {self._open[0]}{_PROMPT}" if self._open else _PROMPT

    def take(self, line: str) -> bool:
        """A command or the user's turn. False when it was the last. Raises ClientError, after having shown it."""
        if line == "/exit":
            return False
        if line == "/reset":
            self._messages, self._open = list(self._beginning), []
            _note("the conversation is forgotten")
        elif line.startswith("/"):
            _note(_HELP if line == "/help" else f"no such command: {line.split()[0]}\n{_HELP}")
        elif line.strip():
            self._say(line)
        return True

    def _say(self, line: str) -> None:
        """The person's own turn, or the result of a call: with the last of them the model goes on."""
        if not self._open:
            self._answer([*self._messages, {"role": "user", "content": line}])
            return
        name, *left = self._open
        messages = [*self._messages, {"role": "tool", "name": name, "content": line}]
        if left:
            self._messages, self._open = messages, left
        else:
            self._answer(messages)

    def _answer(self, messages: list[dict[str, Any]]) -> None:
        pieces: list[Piece] = []
        cancelled = False
        try:
            with self._client.stream(messages=messages, **self._fields) as stream, _on_ctrl_c(stream.cancel) as stopped:
                try:
                    for piece in stream:
                        pieces.append(piece)
                        self._show.piece(piece)
                except Cancelled:
                    if not stopped.is_set():
                        raise  # by the server; by Ctrl-C, what was said is the turn
                    cancelled = True
        except ClientError as error:
            self._show.error("chat", error)
            raise
        self._show.end(pieces, stopped=cancelled)
        said = "".join(piece.text for piece in pieces)
        calls = whole_calls(call for piece in pieces for call in piece.tool_calls)
        if not all(map(_is_whole, calls)):
            _note("what was called is cut off, and no part of the conversation")
            calls = ()
        if said or calls:
            turn: dict[str, Any] = {"role": "assistant", "content": said}
            if calls:
                turn["tool_calls"] = [_as_message(call) for call in calls]
            self._messages, self._open = [*messages, turn], [call.name for call in calls]


def _is_whole(call: ToolCall) -> bool:
    """Its arguments are the JSON of an object, as a history needs them."""
    try:
        return isinstance(json.loads(call.arguments or "{}"), dict)
    except (ValueError, RecursionError):
        return False


def _as_message(call: ToolCall) -> dict[str, Any]:
    return {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _talk(conversation: Conversation, *, prompts: bool) -> int:
    """With a person. Returns the exit code."""
    import readline  # noqa: F401  input() then has an editable line and a history

    _note("/help lists the commands")
    warned = False
    while True:
        try:
            if not conversation.take(input(conversation.prompt if prompts else "")):
                return 0
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print()
            if warned:
                return 130
            _note("Ctrl-C again leaves; so do /exit and Ctrl-D")
            warned = True
            continue
        except ClientError:
            _note("your last message is taken back; /reset forgets the conversation")
        warned = False


@contextmanager
def _on_ctrl_c(act: Callable[[], None]) -> Iterator[Event]:
    """Acts in place of KeyboardInterrupt: nothing is torn out of gRPC's hands. Gives what is set when it has acted."""
    pressed = Event()

    def handler(number: int, frame: FrameType | None) -> None:
        pressed.set()
        act()

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(130)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
