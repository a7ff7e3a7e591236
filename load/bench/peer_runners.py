"""Which engines the peer benchmark knows, in which dtypes, and how each is started."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from load.bench.peer_process import Runner
from load.peers.environment import Environment
from minisgl_backend.models.locate import locate_model

DTYPES = ("fp32", "bf16", "fp16")

NAMES: dict[str, tuple[str, ...]] = {
    "llm": DTYPES,
    "triton": DTYPES,
    "openvino": DTYPES,
    "llamacpp": (*DTYPES, "q8_0", "q4_1"),
    "vllm": DTYPES,
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
        settings = {
            "dtype": dtype,
            "kv_bytes": arguments.kv_bytes,
            "max_running": streams,
            "threads": arguments.threads,
        }
        return ours(name, kind, model, settings)
    environment = Environment.of(kind)
    match kind:
        case "openvino":
            files = [environment.model(model, "fp32")]
            rest = [dtype, str(streams), kv_bytes]
        case "llamacpp":
            files = [environment.folder / "build" / "bin" / "llama-server", environment.model(model, f"{dtype}.gguf")]
            rest = [dtype, str(streams), str(context)]
        case _:
            files = [locate_model(model)]
            rest = [dtype, str(streams), kv_bytes, str(context)]
    if not all(path.exists() for path in (*files, environment.python)):
        raise NotInstalled(f"not installed: run `python -m load.peers.install_{kind} --model {model}`")
    driver = (str(environment.python), "-m", f"load.peers.run_{kind}")
    return Runner(name, (*driver, *map(str, files), *rest), preload(environment) if kind == "vllm" else ())


def ours(name: str, path: str, model: str, settings: Mapping[str, Any]) -> Runner:
    """Our engine. path: `llm`, alone, or `triton`. settings: of the engine."""
    driver = (sys.executable, "-m", "load.peers.run_ours")
    return Runner(name, (*driver, path, model, json.dumps(settings)))


def preload(environment: Environment) -> tuple[tuple[str, str], ...]:
    """What vLLM asks to have loaded first on a CPU, as far as it is here: Intel's OpenMP of its environment, and
    tcmalloc of the system.
    """
    libraries = [environment.folder / "venv" / "lib" / "libiomp5.so"]
    libraries += sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))
    return (("LD_PRELOAD", ":".join(str(path) for path in libraries if path.exists())),)
