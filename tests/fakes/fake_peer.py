"""A peer that computes nothing: its answers count up from the last token of the prompt. For the peer benchmark's tests.

    python tests/fakes/fake_peer.py MODE

Modes: `good`; `short` (one token too few); `silent` (never ready); `broken` (says an error); `illegal` (dies as on a
processor without an instruction it needs); `chatty` (prints to standard output as engines do);
`rounding` (another token after 5: a whole answer is then another); `nonsense` (counts down).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import TextIO

from load.peers.line import Prompts, Ready, Stream, run, serve


def main(answers: TextIO) -> None:
    mode = sys.argv[1]
    if mode == "broken":
        raise ValueError("no such model")
    if mode == "illegal":
        os.kill(os.getpid(), signal.SIGILL)
    if mode == "silent":
        sys.stdin.read()
        return
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as child:
        answer(answers, mode, child.pid)


def answer(answers: TextIO, mode: str, pid: int) -> None:
    def generate(prompts: Prompts, tokens: int, start: float) -> Sequence[Stream]:
        if mode == "chatty":
            print('{"streams": "not an answer"}', flush=True)
        streams = [Stream() for _ in prompts]
        for _ in range(tokens - (mode == "short")):
            for prompt, stream in zip(prompts, streams, strict=True):
                stream.take(start, [following(mode, [*prompt, *stream.token_ids][-1])])
        return streams

    serve(answers, Ready("1", "ids", "engine", {"mode": mode}, [pid]), generate)


def following(mode: str, token: int) -> int:
    if mode == "nonsense":
        return token - 1
    return 60 if mode == "rounding" and token == 5 else token + 1


if __name__ == "__main__":
    run(main)
