"""Which engines the peer benchmark knows, in which dtypes, and how each is started."""

from __future__ import annotations

import argparse
import sys

from load.bench.peer_process import Runner
from load.peers.environment import Environment

DTYPES = ("fp32", "bf16", "fp16")

NAMES: dict[str, tuple[str, ...]] = {
    "llm": DTYPES,
    "triton": DTYPES,
    "openvino": DTYPES,
}
"""Name → dtypes it takes."""

OURS = ("llm", "triton")


class NotInstalled(Exception):
    """A sentence that says what to run."""


def runner(name: str, arguments: argparse.Namespace, streams: int, context: int) -> Runner:
    """How to start `name` (NAME:DTYPE) for so many streams of at most `context` tokens. Raises NotInstalled."""
    kind, dtype = name.split(":")
    model, kv_bytes = arguments.model, str(arguments.kv_bytes)
    if kind in OURS:
        driver = (sys.executable, "-m", "load.peers.run_ours")
        return Runner(name, (*driver, kind, model, dtype, str(streams), kv_bytes))
    environment = Environment.of(kind)
    driver = (str(environment.python), "-m", f"load.peers.run_{kind}")
    exported = environment.model(model, "fp32")
    if not exported.exists() or not environment.python.exists():
        raise NotInstalled(f"not installed: run `python -m load.peers.install_{kind} --model {model}`")
    return Runner(name, (*driver, str(exported), dtype, str(streams), kv_bytes))
