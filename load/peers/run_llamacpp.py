"""llama.cpp's llama-server on a loopback port, one slot a stream, asked over HTTP from this process.

python -m load.peers.run_llamacpp LLAMA_SERVER GGUF_FILE DTYPE STREAMS CONTEXT_TOKENS
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TextIO

from load.peers.line import Prompts, Ready, Stream, run, serve
from minisgl_backend.actors.parent_death import signal_at_parents_end

_KV_TYPES = {"fp32": "f32", "bf16": "bf16"}  # others: f16, its default
_START_S = 120.0
_SPARE_TOKENS = 8  # a slot of exactly prompt + output ends an answer early


def main(answers: TextIO) -> None:
    """Starts the server and answers."""
    program, model, dtype, streams, context = sys.argv[1:]
    cores, kv_type = len(os.sched_getaffinity(0)), _KV_TYPES.get(dtype, "f16")
    settings = {
        "--parallel": int(streams),
        "--ctx-size": int(streams) * (int(context) + _SPARE_TOKENS),
        "--threads": cores,
        "--flash-attn": "off",
        "--cache-type-k": kv_type,
        "--cache-type-v": kv_type,
        "--cache-ram": 0,  # prompts of earlier rounds never come again
    }
    options = [str(part) for pair in settings.items() for part in pair]
    with server(program, "--model", model, "--no-kv-unified", "--no-webui", *options) as port:
        version = subprocess.run([program, "--version"], capture_output=True, text=True).stderr.partition("\n")[0]
        serve(answers, Ready(version, "ids", "client", settings), lambda *command: ask_all(port, *command))


@contextmanager
def server(program: str, *options: str) -> Iterator[int]:
    """A server that answers; its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [program, "--host", "127.0.0.1", "--port", str(port), *options]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=signal_at_parents_end(signal.SIGTERM))
    try:
        deadline = time.monotonic() + _START_S
        while not _is_ready(port):
            if process.poll() is not None:
                raise RuntimeError(f"llama-server ended with {_why(process.returncode)}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"llama-server was not ready within {_START_S:g} s")
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()


def ask_all(port: int, prompts: Prompts, tokens: int, start: float) -> Sequence[Stream]:
    """A thread and a connection for each prompt."""

    def read(prompt: Sequence[int]) -> Stream:
        stream = Stream()
        for event in _events(port, _body(prompt, tokens)):
            stream.take(start, event.get("tokens", []))
        return stream

    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(read, prompts))


def _body(prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    return {
        "prompt": list(prompt),
        "n_predict": tokens,
        "temperature": 0.0,
        "samplers": ["temperature"],  # greedy needs no others
        "seed": 0,
        "ignore_eos": True,
        "stream": True,
        "return_tokens": True,
        "cache_prompt": True,
    }


def _events(port: int, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Server-sent events of one completion."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"llama-server answered {response.status}: {response.read()[:200]!r}")
        for line in response:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))
    finally:
        connection.close()


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _why(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


if __name__ == "__main__":
    run(main)
