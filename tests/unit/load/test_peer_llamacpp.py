"""How llama-server is asked, and what is made of one that does not start; against a server that speaks as it does."""

from __future__ import annotations

import json
import threading
from argparse import Namespace
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from load.bench.peer_runners import NotInstalled, preload, runner
from load.peers.environment import Environment
from load.peers.run_llamacpp import ask_all, server

SIGILL_PROGRAM = "#!/bin/sh\nkill -ILL $$\n"


class Answers(BaseHTTPRequestHandler):
    """Counts up from the last token of the prompt, one event a token, and a last one without tokens."""

    asked: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if body["n_predict"] > 100:
            self.send_error(400)
            return
        self.send_response(200)
        self.end_headers()
        for number in range(body["n_predict"]):
            self._event({"content": "x", "tokens": [body["prompt"][-1] + number + 1], "stop": False})
        self._event({"content": "", "tokens": [], "stop": True})

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def llama_server() -> Iterator[tuple[int, list[dict[str, Any]]]]:
    asked: list[dict[str, Any]] = []
    handler = type("Handler", (Answers,), {"asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield http.server_address[1], asked
        http.shutdown()
        thread.join()


def test_token_ids_go_in_and_come_back_with_a_time_for_each(llama_server: tuple[int, list[dict[str, Any]]]) -> None:
    port, asked = llama_server
    streams = ask_all(port, [[5], [7, 8]], 3, 0.0)
    assert [stream.token_ids for stream in streams] == [[6, 7, 8], [9, 10, 11]]
    assert all(len(stream.times_s) == 3 and stream.times_s == sorted(stream.times_s) for stream in streams)
    assert sorted(body["prompt"] for body in asked) == [[5], [7, 8]]
    assert all(body["temperature"] == 0.0 and body["ignore_eos"] and body["n_predict"] == 3 for body in asked)


def test_a_refused_request_is_an_error_with_its_status(llama_server: tuple[int, list[dict[str, Any]]]) -> None:
    port, _ = llama_server
    with pytest.raises(RuntimeError, match="answered 400"):
        ask_all(port, [[5], [6]], 101, 0.0)


def test_a_server_that_this_processor_can_not_run_is_told_as_that(tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text(SIGILL_PROGRAM)
    program.chmod(0o755)
    with pytest.raises(RuntimeError, match="SIGILL"), server(str(program)):
        pass


@pytest.mark.parametrize("name", ["openvino:fp32", "llamacpp:q4_1", "vllm:bf16"])
def test_a_peer_that_is_not_installed_says_what_to_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    arguments = Namespace(model=str(tmp_path / "model"), kv_bytes=1 << 30)
    with pytest.raises(NotInstalled, match=f"load.peers.install_{name.split(':')[0]}"):
        runner(name, arguments, 4, 64)


def test_only_libraries_that_are_there_are_loaded_first(tmp_path: Path) -> None:
    assert "libiomp5" not in dict(preload(Environment(tmp_path)))["LD_PRELOAD"]
    library = tmp_path / "venv" / "lib" / "libiomp5.so"
    library.parent.mkdir(parents=True)
    library.touch()
    assert dict(preload(Environment(tmp_path)))["LD_PRELOAD"].startswith(str(library))
