"""tritonserver started by hand, with the very lines of docs/configuration.md."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from load.serving import PATIENCE_S, START_S, engine_processes, eventually
from load.streams import MODEL, ask
from minisgl_client.server.ports import claimed_ports

ROOT = Path(__file__).resolve().parents[2]


def lines_of_the_documentation(backends: Path) -> str:
    """The block that sets the environment up, with this environment's folder and a backend folder of our own."""
    blocks = re.findall(r"```\n(.*?)```", (ROOT / "docs" / "configuration.md").read_text(), re.DOTALL)
    (block,) = (block for block in blocks if "--backend-directory" in block)
    environment = str(Path(sys.executable).parent)
    assert ".venv/bin" in block and "/tmp/backends" in block
    block = block.replace("$PWD/.venv/bin", ".venv/bin").replace(".venv/bin", environment)
    return str(block.replace("/tmp/backends", str(backends)).rstrip())


@pytest.fixture
def runtime() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="msg-"))
    yield folder
    shutil.rmtree(folder)


@contextmanager
def started(runtime: Path, tmp_path: Path, **variables: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, int]]]:
    lines = lines_of_the_documentation(tmp_path / "backends")
    with (
        claimed_ports("127.0.0.1", {"--http-port": 0, "--grpc-port": 0, "--metrics-port": 0}) as ports,
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            ["bash", "-ec", f"{lines} {' '.join(f'{option}={port}' for option, port in ports.items())}\n"],
            cwd=ROOT,
            env={**os.environ, "MINISGL_RUNTIME_DIR": str(runtime), **variables},
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process, ports
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(timeout=PATIENCE_S)
                finally:
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)


def test_the_lines_of_the_documentation_start_a_server_that_answers_and_ends_with_its_stub(
    runtime: Path, tmp_path: Path
) -> None:
    settings = json.dumps({"device": "fake", "lease_s": 2, "end_server_with_stub": True})
    with started(runtime, tmp_path, MINISGL_SETTINGS=settings) as (process, ports):
        url = f"http://127.0.0.1:{ports['--http-port']}/v2/models/{MODEL}/ready"

        def ready() -> bool:
            assert process.poll() is None, (tmp_path / "log").read_text()
            try:
                return httpx.get(url, timeout=PATIENCE_S).status_code == 200
            except httpx.TransportError:
                return False

        eventually(ready, START_S, lambda: (tmp_path / "log").read_text())
        answer = asyncio.run(ask(f"127.0.0.1:{ports['--grpc-port']}", "the cat", max_tokens=3))
        assert (answer.reason, answer.finals, answer.error) == ("length", 1, None)
        family = psutil.Process(process.pid).children(recursive=True)
        (stub,) = (child for child in family if f"/{MODEL}/1/model.py" in " ".join(child.cmdline()))
        stub.kill()
        assert process.wait(timeout=PATIENCE_S) != 0
    eventually(lambda: not engine_processes(runtime), PATIENCE_S, lambda: "the engine outlives its lease")


def test_a_model_that_was_never_fetched_is_reported_with_the_command_that_fetches_it(
    runtime: Path, tmp_path: Path
) -> None:
    with started(runtime, tmp_path, MINISGL_CACHE=str(tmp_path / "empty")) as (process, _):
        assert process.wait(timeout=PATIENCE_S) != 0
    assert "model 'smollm2' was never fetched: run `minisgl fetch smollm2`" in (tmp_path / "log").read_text()
    eventually(lambda: not engine_processes(runtime), PATIENCE_S, lambda: "an engine is left")
