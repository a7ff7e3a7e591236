from __future__ import annotations

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
