"""Where the bridge takes the engine's settings from."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.triton_model import MODEL, initialize_args
from minisgl_backend.config import SETTINGS_VARIABLE, EngineConfig
from minisgl_backend.errors import ConfigError
from minisgl_backend.serving.settings import BridgeConfig, bridge_config, engine_config


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.json").write_text('{"page_size": 8, "max_running": 8, "token_budget": 64}')
    return tmp_path


def test_the_repositorys_own_settings_are_valid() -> None:
    assert engine_config(initialize_args(MODEL), {}) == EngineConfig(model="smollm2")


def test_later_layers_win(repository: Path) -> None:
    args = initialize_args(repository, {"max_running": "9", "token_budget": "90", "model": "a/b"})
    config = engine_config(args, {SETTINGS_VARIABLE: '{"token_budget": 900}'})
    assert (config.page_size, config.max_running, config.token_budget, config.model) == (8, 9, 900, "a/b")


@pytest.mark.parametrize("content", [b'{"model": "\xff"}', b"[" * 100_000, b'{"page_size": ' + b"9" * 5000 + b"}"])
def test_a_settings_file_that_can_not_be_read_is_one_sentence(repository: Path, content: bytes) -> None:
    (repository / "1" / "model.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.json "):
        engine_config(initialize_args(repository), {})


def test_tritons_own_parameters_are_left_alone(repository: Path) -> None:
    args = initialize_args(repository, {"EXECUTION_ENV_PATH": "/x.tar.gz"})
    assert engine_config(args, {}).page_size == 8


@pytest.mark.parametrize("parameters", [{"page_siz": "8"}, {"page_size": "eight"}, {"page_size": "0"}])
def test_a_wrong_parameter_is_refused_by_name(repository: Path, parameters: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="page_siz"):
        engine_config(initialize_args(repository, parameters), {})


def test_the_bridges_settings_stand_in_the_same_places_and_are_no_engines(repository: Path) -> None:
    args = initialize_args(repository, {"drain_s": "3"})
    assert bridge_config(args, {}) == BridgeConfig(drain_s=3.0)
    assert bridge_config(args, {SETTINGS_VARIABLE: '{"drain_s": 0.5, "max_running": 5}'}) == BridgeConfig(drain_s=0.5)
    assert engine_config(args, {}) == engine_config(initialize_args(repository), {})


@pytest.mark.parametrize(("value", "says"), [("-1", "from 0 to 86400"), ('"long"', "drain_s"), ("null", "drain_s")])
def test_a_bridge_setting_that_is_wrong_is_refused_by_name(repository: Path, value: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        bridge_config(initialize_args(repository, {"drain_s": value}), {})
    assert "drain_s" in str(raised.value)


def test_a_misspelt_bridge_setting_is_told_the_nearest_name(repository: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'drain_s'"):
        engine_config(initialize_args(repository, {"drains_s": "1"}), {})
