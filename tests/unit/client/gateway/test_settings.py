from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from minisgl_backend.errors import ConfigError
from minisgl_client.cli import build_parser, main
from minisgl_client.gateway.settings import KEYS_VARIABLE, read_api_keys


def test_keys_come_from_the_environment_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\n  two\n\nthree\none\n")
    assert read_api_keys(file, {KEYS_VARIABLE: "one, four"}) == ("one", "four", "two", "three")
    assert read_api_keys(None, {}) == ()


@pytest.mark.parametrize("text", ["", "# none\n", "a key\n", "schlüssel\n"])
def test_a_file_without_a_usable_key_is_refused_and_no_key_is_shown(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_api_keys(file, {})
    assert "a key" not in str(caught.value) and "schl" not in str(caught.value)


def test_an_empty_variable_does_not_open_the_gateway() -> None:
    with pytest.raises(ConfigError, match=KEYS_VARIABLE):
        read_api_keys(None, {KEYS_VARIABLE: " "})


def test_a_file_that_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateway", "--api-keys", "/nowhere/keys", "--port", "0"]) == 2
    assert capsys.readouterr().err.startswith("minisgl: the file of API keys can not be read")


@pytest.mark.parametrize("option", [["--port", "70000"], ["--max-body", "0"], ["--timeout", "nan"], ["--drain", "x"]])
def test_an_option_out_of_range_is_refused(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["gateway", *option])
    assert option[0] in capsys.readouterr().err


def test_no_key_can_be_given_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["gateway", "--api-key", "secret"])
    assert "unrecognized arguments" in capsys.readouterr().err


def test_a_missing_package_is_answered_with_the_gateways_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "minisgl_client.gateway.run", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["gateway", "--port", "0"]) == 1
    assert "'uvicorn' is missing: pip install 'minisgl-triton[gateway]'" in capsys.readouterr().err


def test_a_server_with_a_gateway_that_is_not_installed_does_not_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("minisgl_client.server.gateway._PACKAGES", ("uvicorn", "no_such_package"))
    free = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")
    assert main(["serve", *free, "--set", "device=fake", "--openai", "0"]) == 1
    assert "--openai: no_such_package not installed: pip install" in capsys.readouterr().err


def test_a_port_that_is_taken_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["gateway", "--port", str(port)]) == 2
    assert f"port {port} of '127.0.0.1' can not be taken" in capsys.readouterr().err
