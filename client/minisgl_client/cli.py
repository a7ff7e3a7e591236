"""The command `minisgl`. Each subcommand is a module of `commands/`; this one turns their errors into sentences.

0    done
1    the server can not start here, or died; an answer failed or broke off
2    a setting, an argument or a request is wrong
3    the model is not there
4    the model is there but not supported
5    no answer from the server now; the same may work later
6    an answer took longer than --timeout
130  interrupted
141  nobody reads the output any more
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from minisgl_backend.errors import StartError
from minisgl_client.commands import chat, doctor, fetch, gateway, generate, inspect, models, serve
from minisgl_client.errors import Cancelled, ClientError, RequestRefused, TimedOut, Unavailable, Unsupported


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    arguments = build_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _interrupt)  # so that temporary folders are removed, as for Ctrl-C
    try:
        return int(arguments.run(arguments))
    except StartError as error:
        print(f"minisgl: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("minisgl"):
            raise
        install = f"pip install 'minisgl-triton[{_EXTRAS.get(arguments.command, 'server')}]'"
        print(f"minisgl {arguments.command}: the package {error.name!r} is missing: {install}", file=sys.stderr)
        return 1
    except ClientError as error:  # its command has shown it
        return _CLIENT_EXIT_CODES.get(type(error), 1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 141
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(prog="minisgl", description="An LLM engine inside Triton Inference Server.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve.add_parser(commands)
    fetch.add_parser(commands)
    models.add_parser(commands)
    inspect.add_parser(commands)
    doctor.add_parser(commands)
    generate.add_parser(commands)
    chat.add_parser(commands)
    gateway.add_parser(commands)
    return parser


_EXTRAS = {"gateway": "gateway"}
"""Command → what of the package it needs, where that is not the server."""

_CLIENT_EXIT_CODES: dict[type[ClientError], int] = {
    RequestRefused: 2,
    Unsupported: 2,
    Unavailable: 5,
    TimedOut: 6,
    Cancelled: 130,
}


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
