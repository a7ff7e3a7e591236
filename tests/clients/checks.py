"""Runs in the environment of a client stack, where neither pytest nor this project is: each function of a module whose
name begins with `check_`, in the order in which they stand, against a server that somebody else holds.

    python checks.py MODULE ADDRESSES     MODULE: with_litellm.py and the like; ADDRESSES: JSON, see `Addresses`

One JSON line on stdout after each: its name, how it failed ("" when it did not), and of how many tokens the answer was
that it left unfinished on purpose. It goes on when a line comes on stdin: the server can be looked at in between. The
last may be `leaves_by_dying`, after which the process is gone without a word to anybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import inspect
import io
import json
import os
import re
import runpy
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENDLESS_TOKENS = 4000
"""Of an answer that is left: minutes of the test's model."""

MANY_TOKENS = 64
"""Of a stream that must come in several pieces: a busy machine puts tokens together, and not a second of them."""


@dataclass(frozen=True)
class Addresses:
    """Where the server is, and what it answers greedily, as it was asked without any of these clients."""

    http: str  # of Triton: http://host:port
    grpc: str  # of Triton: host:port
    gateway: str  # http://host:port/v1
    key: str  # of the gateway
    prompt: str
    tokens: int  # max_tokens of all answers below
    completion: str  # to the prompt
    completion_and_one: str  # of one token more
    chat: str  # to the prompt as a user's message
    chat_tokens: int  # prompt tokens of that
    example: str  # the stack's code in docs/clients.md, with these addresses


def main(module: str, addresses: str) -> None:
    """Libraries print as they like: their stdout becomes stderr."""
    told = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    at = Addresses(**json.loads(addresses))
    names = {**BUILT_IN, **runpy.run_path(module)}
    loop = asyncio.new_event_loop()  # one for all, which never rests, as in a program: clients keep connections in it
    threading.Thread(target=loop.run_forever, daemon=True).start()
    for name, check in names.items():
        if name.startswith("check_") or name == "leaves_by_dying":
            failure, left = _outcome(check, at, loop)
            print(json.dumps({"name": name, "failure": failure, "left": left}), file=told, flush=True)
            if name == "leaves_by_dying":
                os._exit(0)
            sys.stdin.readline()


def _outcome(
    check: Callable[[Addresses], Any], at: Addresses, loop: asyncio.AbstractEventLoop
) -> tuple[str, int | None]:
    try:
        left = check(at)
        return "", asyncio.run_coroutine_threadsafe(left, loop).result() if inspect.iscoroutine(left) else left
    except Exception:
        return traceback.format_exc(), None


def every_requirement_is_met(at: Addresses) -> None:
    """What `pip check` would say: of the stack's own packages, and of those which they need."""
    from packaging.requirements import Requirement

    own = Path(sys.prefix)
    found = [dist for dist in importlib.metadata.distributions() if own in Path(str(dist.locate_file(""))).parents]
    waiting, seen, problems = [(dist, "") for dist in found], set(), []
    assert found, "no package of its own"
    while waiting:
        dist, extra = waiting.pop()
        if (dist.name, extra) in seen:
            continue
        seen.add((dist.name, extra))
        for line in dist.requires or ():
            need = Requirement(line)
            if need.marker and not need.marker.evaluate({"extra": extra}):
                continue
            try:
                needed = importlib.metadata.distribution(need.name)
            except importlib.metadata.PackageNotFoundError:
                problems.append(f"{dist.name} needs {line}")
                continue
            if not need.specifier.contains(needed.version, prereleases=True):
                problems.append(f"{dist.name} needs {line}, found {needed.version}")
            waiting += [(needed, ""), *((needed, wanted) for wanted in need.extras)]
    assert not problems, "\n".join(problems)


def the_example_runs(at: Addresses) -> None:
    """And prints something."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(at.example, {})
    assert printed.getvalue().strip()


BUILT_IN: dict[str, Callable[[Addresses], None]] = {
    "check_that_every_requirement_is_met": every_requirement_is_met,
    "check_that_the_pages_example_runs": the_example_runs,
}
"""Checks of every stack."""


def raised(kind: type[Exception], words: str, call: Callable[[], Any]) -> Any:
    """The exception, whose message has these words."""
    try:
        came = call()
    except kind as error:
        assert re.search(words, str(error)), f"{words!r} is not in {error}"
        return error
    raise AssertionError(f"no {kind.__name__}, but {came!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
