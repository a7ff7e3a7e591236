"""`minisgl generate` and `minisgl chat` as programs, against a gRPC server in this process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from fakes.inference_server import InferenceServer, aborts, inputs_of, pieces, response, says, then_waits
from fakes.terminal import CTRL_C, CTRL_D, terminal
from load.serving import eventually
from minisgl_client.commands.asking import NO_PARAMETERS
from minisgl_client.requests import RequestFields, SamplingFields

PATIENCE_S = 60.0
MINISGL = str(Path(sys.executable).parent / "minisgl")

pytestmark = pytest.mark.slow  # each starts a Python


def minisgl(*arguments: str, stdin: str | bytes = "") -> subprocess.CompletedProcess[str]:
    given = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run([MINISGL, *arguments], input=given, capture_output=True, timeout=PATIENCE_S)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def chats(server: InferenceServer) -> list[Any]:
    return [json.loads(inputs_of(request)["messages"]) for request in server.requests]


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_generate_prints_the_answer_and_sends_what_was_asked(server: InferenceServer) -> None:
    options = ("--max-tokens", "5", "--temperature", "0", "--top-k", "3", "--set", "ignore_eos=true", "--set", "x=y")
    done = minisgl("generate", "--url", server.url, *options, "Hé")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Paris é\n", "")
    sent = inputs_of(server.requests[0])
    assert sent["text_input"] == "Hé" and sent["stream"]
    asked = {"max_tokens": 5, "temperature": 0, "top_k": 3, "ignore_eos": True, "x": "y"}
    assert json.loads(sent["sampling_parameters"]) == asked


def test_a_proxy_for_the_network_is_not_asked_for_this_machine(
    server: InferenceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    assert minisgl("generate", "--url", server.url, "x").stdout == "Paris é\n"
    assert minisgl("generate", "--url", "minisgl.invalid:8001", "x").returncode == 5


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_generate_reads_its_prompt_from_stdin(server: InferenceServer, arguments: tuple[str, ...]) -> None:
    assert minisgl("generate", "--url", server.url, *arguments, stdin="a\n\n").returncode == 0
    assert inputs_of(server.requests[0])["text_input"] == "a\n"


def test_generate_takes_a_chat_and_a_whole_answer(server: InferenceServer) -> None:
    server.script = pieces("all\n")
    done = minisgl("generate", "--url", server.url, "--messages", "--no-stream", json.dumps([turn("user", "Hé")]))
    assert (done.returncode, done.stdout) == (0, "all\n")
    assert chats(server) == [[turn("user", "Hé")]]
    assert "stream" not in inputs_of(server.requests[0])


def test_generate_for_scripts_is_json_lines(server: InferenceServer) -> None:
    counted = {"num_output_tokens": [2], "num_input_tokens": [5]}
    server.script = says(
        response(final=False, text_output=["é"], finish_reason=["None"], **counted),
        response(final=True, text_output=["!"], finish_reason=["stop"], **counted),
    )
    done = minisgl("generate", "--url", server.url, "--json", "x")
    first, second, answer = events(done.stdout)
    assert (first["event"], first["text"], first["finish_reason"]) == ("piece", "é", None)
    assert (second["text"], second["finish_reason"], second["usage"]["output_tokens"]) == ("!", "stop", 2)
    assert (answer["event"], answer["text"], answer["finish_reason"]) == ("answer", "é!", "stop")
    assert (answer["usage"]["input_tokens"], answer["usage"]["output_tokens"]) == (5, 4)
    assert done.stdout.isascii()


@pytest.mark.parametrize(
    ("script", "code", "out", "error"),
    [
        (aborts(grpc.StatusCode.INVALID_ARGUMENT, "top_p:\nno"), 2, "", "top_p: no (INVALID_ARGUMENT)"),
        (aborts(grpc.StatusCode.UNAVAILABLE, "full"), 5, "", "full (UNAVAILABLE)"),
        (aborts(grpc.StatusCode.UNAVAILABLE, "died", "Pa"), 1, "Pa\n", "died (UNAVAILABLE)"),
        (aborts(grpc.StatusCode.INTERNAL, "oh"), 1, "", "oh (INTERNAL)"),
    ],
)
def test_an_error_is_a_line_on_stderr_and_an_exit_code(
    server: InferenceServer, script: Any, code: int, out: str, error: str
) -> None:
    server.script = script
    done = minisgl("generate", "--url", server.url, "x")
    assert (done.returncode, done.stdout, done.stderr) == (code, out, f"minisgl generate: {error}\n")


def test_an_error_is_an_event_for_scripts(server: InferenceServer) -> None:
    server.script = aborts(grpc.StatusCode.INVALID_ARGUMENT, "top_p: no")
    done = minisgl("generate", "--url", server.url, "--json", "x")
    expected = {"event": "error", "kind": "RequestRefused", "status": "INVALID_ARGUMENT", "message": "top_p: no"}
    assert (done.returncode, events(done.stdout)) == (2, [expected])


@pytest.mark.parametrize(
    ("arguments", "stdin", "code", "named"),
    [
        (("--messages", "{}"), "", 2, "messages"),
        (("--messages", "no"), "", 2, "messages"),
        ((), b"\xff", 2, "prompt"),
        (("--set", "x", "y"), "", 2, "key=value"),
        (("--timeout", "0", "y"), "", 2, "timeout_s"),
        (("--set", "stream=true", "y"), "", 2, "'stream' is no sampling parameter"),
        (("--url", "127.0.0.1:1", "y"), "", 5, "refused"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple[str, ...], stdin: str | bytes, code: int, named: str) -> None:
    done = minisgl("generate", "--url", "127.0.0.1:1", *arguments, stdin=stdin)
    assert done.returncode == code and named in done.stderr and "Traceback" not in done.stderr


def test_what_is_no_sampling_parameter_is_all_that_a_client_takes_beside_them() -> None:
    beside = RequestFields.__annotations__.keys() - SamplingFields.__annotations__.keys()
    assert beside | {"text", "stream"} == NO_PARAMETERS


def test_counts_are_asked_for_only_where_they_are_shown(server: InferenceServer) -> None:
    """So that `generate --model summarise` works, whose contract has none."""
    minisgl("generate", "--url", server.url, "x")
    minisgl("generate", "--url", server.url, "--json", "x")
    plain, as_json = (set(inputs_of(request)) for request in server.requests)
    assert plain == {"text_input", "stream"}
    assert as_json - plain == {"return_num_input_tokens", "return_num_output_tokens", "return_perf_metrics"}


def test_a_timeout_ends_generate(server: InferenceServer) -> None:
    server.script = then_waits("first")
    assert minisgl("generate", "--url", server.url, "--timeout", "2", "x").returncode == 6
    assert server.cancelled.acquire(timeout=PATIENCE_S)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_generate(server: InferenceServer, number: signal.Signals) -> None:
    server.script = then_waits("first")
    with subprocess.Popen([MINISGL, "generate", "--url", server.url, "x"], stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None and process.stdout.read(5) == "first"
        process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (130, "")
    assert server.cancelled.acquire(timeout=PATIENCE_S)


def test_generate_ends_when_nobody_reads_it_any_more(server: InferenceServer) -> None:
    def endless(request: Any, context: Any, server: InferenceServer) -> Any:
        context.add_callback(server.cancelled.release)
        pause = threading.Event()
        while context.is_active() and not pause.wait(0.01):
            yield response(final=False, text_output=["line\n"], finish_reason=["None"])

    server.script = endless
    with subprocess.Popen([MINISGL, "generate", "--url", server.url, "x"], stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "line\n"
        process.stdout.close()
        assert (process.stderr.read(), process.wait(timeout=PATIENCE_S)) == ("", 141)
    assert server.cancelled.acquire(timeout=PATIENCE_S)


def parsed(text: str, reasoning: str, *calls: dict[str, Any], reason: str = "None") -> Any:
    """A response of an answer that is parsed; with a reason the last."""
    outputs: dict[str, Any] = {"reasoning_output": [reasoning], "tool_calls": [json.dumps(calls)]}
    return response(final=reason != "None", text_output=[text], finish_reason=[reason], **outputs)


CALLS = says(
    parsed("", "It is a city. "),
    parsed("Let me see.", "Look!", {"index": 0, "name": "weather", "arguments": '{"city"'}),
    parsed(
        "", "", {"index": 0, "arguments": ': "Paris"}'}, {"index": 1, "name": "clock", "arguments": ""}, reason="stop"
    ),
)
TOOLS = [{"type": "function", "function": {"name": "weather"}}]


@pytest.fixture
def tools(tmp_path: Path) -> str:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(TOOLS))
    return str(path)


def test_generate_shows_reasoning_and_calls_beside_the_text(server: InferenceServer, tools: str) -> None:
    server.script = CALLS
    chat = json.dumps([turn("user", "How warm?")])
    done = minisgl("generate", "--url", server.url, "--messages", "--tools", tools, chat)
    assert (done.returncode, done.stdout) == (0, "Let me see.\n")
    assert done.stderr == 'It is a city. Look!\ncall: weather {"city": "Paris"}\ncall: clock \n'
    sent = inputs_of(server.requests[0])
    assert json.loads(sent["tools"]) == TOOLS and sent["parse_output"]
    minisgl("generate", "--url", server.url, "--messages", "--parse-output", chat)
    assert inputs_of(server.requests[1]).keys() == {"messages", "parse_output", "stream"}


def test_events_tell_all_that_was_asked_for(server: InferenceServer, tools: str) -> None:
    server.script = CALLS
    chat = json.dumps([turn("user", "How warm?")])
    done = minisgl("generate", "--url", server.url, "--json", "--messages", "--tools", tools, chat)
    first, second, _, answer = events(done.stdout)
    assert first["reasoning"] == "It is a city. " and "tool_calls" not in first and "samples" not in first
    assert second["tool_calls"] == [{"index": 0, "name": "weather", "arguments": '{"city"'}]
    assert (answer["text"], answer["reasoning"]) == ("Let me see.", "It is a city. Look!")
    assert [call["arguments"] for call in answer["tool_calls"]] == ['{"city": "Paris"}', ""]


def test_events_tell_of_logprobs_and_of_every_answer(server: InferenceServer) -> None:
    told = json.dumps([{"7": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}])
    one = {"num_output_tokens": [1, 1], "output_ids": [7, 7], "logprobs": [told, told]}
    server.script = says(response(final=True, text_output=["a", "b"], finish_reason=["stop", "length"], **one))
    done = minisgl("generate", "--url", server.url, "--json", "--set", "n=2", "--set", "logprobs=0", "x")
    answer = events(done.stdout)[-1]
    assert [sample["text"] for sample in answer["samples"]] == ["a", "b"]
    assert answer["logprobs"][0]["7"]["logprob"] == -0.5 and answer["output_ids"] == [7]


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_more_answers_than_are_shown_are_refused(server: InferenceServer, command: str) -> None:
    done = minisgl(command, "--url", server.url, "--set", "n=2", stdin="x\n")
    assert (done.returncode, server.requests) == (2, []) and f"minisgl {command}: n: " in done.stderr


@pytest.mark.parametrize("text", ["{", None])
def test_tools_that_are_no_json_are_named(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "tools.json"
    if text is not None:
        path.write_text(text)
    done = minisgl("generate", "--tools", str(path), "x")
    assert done.returncode == 2 and "--tools" in done.stderr and "Traceback" not in done.stderr


# ── chat ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_chat_keeps_the_conversation_and_forgets_it_when_told(server: InferenceServer) -> None:
    lines = "Hé\n\n/nonsense\n  /more\n/reset\nagain\n/exit\nnever\n"
    done = minisgl("chat", "--url", server.url, "--system", "Be short.", stdin=lines)
    assert (done.returncode, done.stdout) == (0, "Paris é\n" * 3)
    assert "no such command: /nonsense" in done.stderr
    system, first = turn("system", "Be short."), [turn("user", "Hé"), turn("assistant", "Paris é")]
    assert chats(server) == [
        [system, first[0]],
        [system, *first, turn("user", "  /more")],
        [system, turn("user", "again")],
    ]
    assert json.loads(inputs_of(server.requests[0])["sampling_parameters"]) == {"max_tokens": 512}


def test_an_error_ends_a_scripted_chat_with_its_code(server: InferenceServer) -> None:
    server.script = aborts(grpc.StatusCode.INVALID_ARGUMENT, "messages: too long")
    done = minisgl("chat", "--url", server.url, "--json", stdin="one\ntwo\n")
    assert (done.returncode, [event["event"] for event in events(done.stdout)]) == (2, ["error"])
    assert done.stderr == "minisgl chat: messages: too long (INVALID_ARGUMENT)\n"
    assert len(server.requests) == 1


@pytest.mark.parametrize(("status", "code"), [(grpc.StatusCode.CANCELLED, 130), (grpc.StatusCode.UNAVAILABLE, 1)])
def test_an_answer_that_the_server_ends_early_is_no_turn(
    server: InferenceServer, status: grpc.StatusCode, code: int
) -> None:
    server.script = aborts(status, "ended there", "Pa")
    done = minisgl("chat", "--url", server.url, stdin="one\ntwo\n")
    assert (done.returncode, done.stdout) == (code, "Pa\n") and "ended there" in done.stderr


def test_a_line_that_is_no_utf8_is_refused(server: InferenceServer) -> None:
    done = minisgl("chat", "--url", server.url, stdin=b"\xff\n")
    assert done.returncode == 2 and done.stderr.startswith("minisgl chat: messages: ")


def test_ctrl_c_stops_an_answer_and_not_the_chat(server: InferenceServer) -> None:
    server.script = then_waits("what", " was", " said")
    with terminal("chat", "--url", server.url) as person:
        person.read_until("> ")
        person.type("tell me\n")
        person.read_until("what was said")
        person.type(CTRL_C)
        person.read_until("^C\r\n> ")
        assert server.cancelled.acquire(timeout=PATIENCE_S)
        server.script = pieces("more", "")
        person.type("go on\n")
        person.read_until("more\r\n> ")
        person.type(CTRL_D)
        assert person.end() == 0
    said = [turn("user", "tell me"), turn("assistant", "what was said")]
    assert chats(server)[1] == [*said, turn("user", "go on")]


def test_ctrl_c_before_the_first_word_takes_the_message_back(server: InferenceServer) -> None:
    server.script = then_waits()
    with terminal("chat", "--url", server.url) as person:
        person.read_until("> ")
        person.type("tell me\n")
        eventually(lambda: server.requests, PATIENCE_S, lambda: "no request")
        person.type(CTRL_C)
        person.read_until("^C\r\n> ")
        assert server.cancelled.acquire(timeout=PATIENCE_S)
        server.script = pieces("yes")
        person.type("well?\n")
        person.read_until("yes\r\n> ")
        person.type("/exit\n")
        assert person.end() == 0
    assert chats(server)[1] == [turn("user", "well?")]


def test_ctrl_c_at_the_prompt_hints_and_the_second_one_leaves(server: InferenceServer) -> None:
    with terminal("chat", "--url", server.url) as person:
        person.read_until("> ")
        person.type("half a thou")
        person.read_until("half a thou")
        person.type(CTRL_C)
        person.read_until("Ctrl-C again leaves")
        person.read_until("> ")
        person.type("Hé\n")  # then the count begins anew
        person.read_until("Paris é\r\n> ")
        person.type(CTRL_C)
        person.read_until("Ctrl-C again leaves")
        person.read_until("> ")
        person.type(CTRL_C)
        assert person.end() == 130
    assert chats(server) == [[turn("user", "Hé")]]


def test_a_person_may_try_again_after_an_error(server: InferenceServer) -> None:
    server.script = aborts(grpc.StatusCode.UNAVAILABLE, "the engine died", "Pa")
    with terminal("chat", "--url", server.url) as person:
        person.read_until("> ")
        person.type("one\n")
        person.read_until("Pa\r\nminisgl chat: the engine died (UNAVAILABLE)\r\n")
        person.read_until("> ")
        server.script = pieces("yes")
        person.type("/help\n")
        person.read_until("/reset")
        person.read_until("> ")
        person.type("two\n")
        person.read_until("yes\r\n> ")
        person.signal(signal.SIGTERM)
        assert person.end() == 130
    assert chats(server)[1] == [turn("user", "two")]


def test_a_chat_asks_for_the_results_of_calls_and_goes_on_with_the_last(server: InferenceServer, tools: str) -> None:
    server.script = CALLS
    options = ("--url", server.url, "--tools", tools)
    with terminal("chat", *options) as person:
        person.read_until("> ")
        person.type("How warm is it?\n")
        person.read_until("result of weather> ")
        person.type("21 degrees\n")
        person.read_until("result of clock> ")
        server.script = pieces("Warm.")
        person.type("noon\n")
        person.read_until("Warm.\r\n> ")
        person.type("Thanks\n")
        person.read_until("Warm.\r\n> ")
        person.type(CTRL_D)
        assert person.end() == 0
    calls = [
        {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}},
        {"type": "function", "function": {"name": "clock", "arguments": ""}},
    ]
    history = [
        turn("user", "How warm is it?"),
        {**turn("assistant", "Let me see."), "tool_calls": calls},
        {"role": "tool", "name": "weather", "content": "21 degrees"},
        {"role": "tool", "name": "clock", "content": "noon"},
    ]
    assert chats(server)[1:] == [history, [*history, turn("assistant", "Warm."), turn("user", "Thanks")]]


def test_a_call_that_was_cut_and_reasoning_are_no_part_of_a_conversation(server: InferenceServer, tools: str) -> None:
    server.script = says(
        parsed("Well.", "Hm.", {"index": 0, "name": "weather", "arguments": '{"city'}, reason="length")
    )
    done = minisgl("chat", "--url", server.url, "--tools", tools, stdin="one\ntwo\n")
    assert done.returncode == 0 and "cut off" in done.stderr
    assert chats(server)[1] == [turn("user", "one"), turn("assistant", "Well."), turn("user", "two")]
