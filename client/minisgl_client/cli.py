"""The command `minisgl`. Each subcommand is a module of `commands/`; this one turns their errors into sentences.

0    done
1    the server can not start here, or died
2    a setting or an argument is wrong
3    the model is not there
4    the model is there but not supported
130  interrupted
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from minisgl_backend.errors import StartError
from minisgl_client.commands import fetch, serve


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
        print(
            f"minisgl {arguments.command}: the package {error.name!r} is missing: pip install 'minisgl-triton[server]'",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(prog="minisgl", description="An LLM engine inside Triton Inference Server.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve.add_parser(commands)
    fetch.add_parser(commands)
    return parser


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
