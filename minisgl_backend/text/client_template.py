"""A chat template that a client sent: rendered in a process of its own, whose time and memory have limits.

    render_client_template ── JSON on stdin ──► python -m (this module) ── JSON on stdout ──► text, or what is wrong

Where it stands in the flow: `Tokenizer.render_chat`, in a thread, for a request with `chat_template`; only where the
operator allows it. Jinja's sandbox guards names and attributes, not time and memory: nothing ends a loop in a thread,
and one expression (`10 ** (10 ** 9)`, `'%9999999999d' % 1`) stops the interpreter or takes all memory, and with it
every stream of the engine.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from minisgl_backend.errors import EngineUnavailable, InvalidRequest
from minisgl_backend.text.chat_template import TemplateFault, compile_template, render_template

FIELD = "chat_template"

CPU_S = 2  # of the process, of which its start takes 0.2
MEMORY_BYTES = 512 << 20  # of address space, of which its start takes a tenth
MAX_CHARS = 4 << 20  # of the text: as large as a chat may be
_WALL_S = 60.0  # only for a machine so busy that two seconds of work take longer

_log = logging.getLogger(__name__)


class _Answer(msgspec.Struct):
    """Of the process. One of the two is there."""

    text: str | None = None
    fault: str = ""


def render_client_template(source: str, variables: Mapping[str, Any]) -> str:
    """The prompt. variables: what JSON can hold. Takes 0.2 s at least.

    Raises InvalidRequest naming `chat_template`; EngineUnavailable when there is no room for a process.
    """
    asked = json.dumps({"source": source, "variables": variables}).encode()
    command = [sys.executable, "-P", "-m", __name__]
    try:
        done = subprocess.run(
            command, input=asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/", timeout=_WALL_S
        )
    except (OSError, subprocess.TimeoutExpired):
        _log.exception("a client's template could not be rendered")
        raise EngineUnavailable(f"{FIELD}: there is no room to render it now; try again later") from None
    if done.returncode:
        raise InvalidRequest(FIELD, f"needs more than {CPU_S} s or {MEMORY_BYTES >> 20} MiB to render the messages")
    answer = msgspec.json.decode(done.stdout, type=_Answer)
    if answer.text is None:
        raise InvalidRequest(FIELD, answer.fault)
    return answer.text


def _main() -> None:
    """The process. It steps back behind the engine's own."""
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    asked = json.load(sys.stdin.buffer)
    sys.stdout.buffer.write(msgspec.json.encode(_render(asked["source"], asked["variables"])))


def _render(source: str, variables: Mapping[str, Any]) -> _Answer:
    try:
        text = render_template(compile_template(source), variables)
    except TemplateFault as fault:
        return _Answer(fault=str(fault))
    if len(text) > MAX_CHARS:
        return _Answer(fault=f"makes a text of {len(text)} characters; at most {MAX_CHARS} are taken")
    try:
        text.encode()
    except UnicodeEncodeError:
        return _Answer(fault="writes a lone surrogate, which is no character")
    return _Answer(text)


if __name__ == "__main__":
    _main()
