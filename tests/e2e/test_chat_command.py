"""`minisgl chat` and `minisgl generate` at a terminal, before a real tritonserver."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.terminal import CTRL_C, CTRL_D, terminal
from fakes.tiny_model import make_tiny_llama
from load.serving import PATIENCE_S, Server, eventually, serving

MINISGL = str(Path(sys.executable).parent / "minisgl")
TOKENS = 1000
ENDLESS = ("--max-tokens", str(TOKENS), "--set", "ignore_eos=true")


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A token every 20 ms, for 20 seconds."""
    model = make_tiny_llama(tmp_path_factory.mktemp("tiny"))
    with serving("--model", str(model), device="fake", fake_step_ms=20) as server:
        yield server


def running(server: Server) -> None:
    eventually(lambda: server.stats().running == 1, PATIENCE_S, lambda: f"not running: {server.stats()}")


def test_ctrl_c_in_a_chat_ends_the_answer_on_the_server_and_the_chat_goes_on(endless: Server) -> None:
    with terminal("chat", "--url", endless.grpc, *ENDLESS) as person:
        person.read_until("> ")
        for _ in range(2):
            with endless.cut_short(TOKENS):
                person.type("tell me everything\n")
                running(endless)
                person.type(CTRL_C)
                person.read_until("\r\n> ")
        person.type("/reset\n")
        person.read_until("> ")
        person.type(CTRL_D)
        assert person.end() == 0


def test_leaving_a_chat_in_the_middle_of_an_answer_ends_it(endless: Server) -> None:
    for number, code in ((signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)):
        with endless.cut_short(TOKENS), terminal("chat", "--url", endless.grpc, *ENDLESS) as person:
            person.read_until("> ")
            person.type("tell me everything\n")
            running(endless)
            person.process.send_signal(number)
            assert person.end() == code


def test_ctrl_c_in_generate_ends_the_request(endless: Server) -> None:
    with endless.cut_short(TOKENS), terminal("generate", "--url", endless.grpc, *ENDLESS, "Once") as person:
        running(endless)
        person.type(CTRL_C)
        assert person.end() == 130
        assert "Traceback" not in person.text


def test_a_conversation_grows_turn_by_turn_and_is_forgotten_on_reset(server: Server) -> None:
    lines = "Name a river.\nName a river.\n/reset\nName a river.\n"
    answers = [event for event in chat(server, lines) if event["event"] == "answer"]
    first, second, third = (answer["usage"]["input_tokens"] for answer in answers)
    assert first == third and second >= first + answers[0]["usage"]["output_tokens"]
    assert answers[0]["text"] == answers[2]["text"] != ""


def chat(server: Server, lines: str) -> list[dict[str, Any]]:
    command = [MINISGL, "chat", "--url", server.grpc, "--json", "--temperature", "0", "--max-tokens", "4"]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
