"""The driven side of a benchmarked engine: JSON lines on its standard input and output.

    parent ── {"prompts": [[id, …], …], "tokens": n} ──► child
    parent ◄── {"ready": {…}} once, then {"streams": [{"times_s": [], "tokens": [], "token_ids": []}, …]} per command
    parent ◄── {"error": "…"} instead of either; the child then ends

Loads only the standard library: it runs in environments that hold nothing of ours. What an engine prints goes to
standard error. The child ends when its input does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

Prompts = Sequence[Sequence[int]]


@dataclass
class Stream:
    """One answer. `times_s` and `tokens` have one element for each piece that arrived."""

    times_s: list[float] = field(default_factory=list)  # from the moment the command was taken
    tokens: list[int] = field(default_factory=list)  # in that piece
    token_ids: list[int] = field(default_factory=list)  # of the whole answer

    def take(self, start: float, token_ids: Sequence[int]) -> None:
        """A piece that is here now. start: of the round, by time.perf_counter."""
        if token_ids:
            self.times_s.append(time.perf_counter() - start)
            self.tokens.append(len(token_ids))
            self.token_ids += token_ids


@dataclass(frozen=True)
class Ready:
    """What an engine says of itself once it can take prompts."""

    version: str
    takes: str  # "ids" or "text": what a prompt becomes on its way in
    driver: str  # "client": the child only talks to the engine; "engine": the engine works in the child
    settings: dict[str, Any] = field(default_factory=dict)  # those that matter for speed
    pids: list[int] = field(default_factory=list)  # of processes that are no descendants of the child


Generate = Callable[[Prompts, int, float], Sequence[Stream]]
"""(prompts, tokens of each answer, start by time.perf_counter) → one stream per prompt. Greedy; end tokens ignored."""


def take_standard_output() -> TextIO:
    """The way to the parent. From here on everything that is printed goes to standard error, from C++ also."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def serve(answers: TextIO, ready: Ready, generate: Generate) -> None:
    """Answers commands until the input ends."""
    say(answers, {"ready": asdict(ready)})
    for line in sys.stdin:
        command = json.loads(line)
        start = time.perf_counter()
        streams = generate(command["prompts"], command["tokens"], start)
        say(answers, {"streams": [asdict(stream) for stream in streams]})


def say(answers: TextIO, message: dict[str, Any]) -> None:
    """One line to the parent."""
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def run(main: Callable[[TextIO], None]) -> None:
    """`main` with the way to the parent; what breaks is told there in one line, and in full on standard error."""
    answers = take_standard_output()
    try:
        main(answers)
    except Exception as error:
        say(answers, {"error": f"{type(error).__name__}: {error}"})
        raise
