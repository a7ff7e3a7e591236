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


@pytest.fixture
def sharing(tmp_path: Path) -> Path:
    """A model that shares the engine of its neighbour `llm`; its folder."""
    (tmp_path / "llm" / "1").mkdir(parents=True)
    (tmp_path / "llm" / "1" / "model.json").write_text('{"page_size": 8, "max_running": 8, "drain_s": 4}')
    (tmp_path / "llm" / "config.pbtxt").write_text(
        'backend: "python"\n'
        'parameters { key: "max_running" value { string_value: "9" } }\n'
        'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "/x" } }\n'
    )
    (tmp_path / "twin").mkdir()
    return tmp_path / "twin"


def test_a_model_that_shares_an_engine_takes_all_settings_from_its_owner(sharing: Path) -> None:
    twin = initialize_args(sharing, {"engine_of": "llm"})
    environment = {SETTINGS_VARIABLE: '{"token_budget": 900}'}
    config = engine_config(twin, environment)
    assert (config.page_size, config.max_running, config.token_budget) == (8, 9, 900)
    owner = initialize_args(sharing.parent / "llm")
    assert config == engine_config(owner, environment)
    assert bridge_config(twin, {}) == BridgeConfig(drain_s=4.0)
    own = initialize_args(sharing, {"engine_of": "llm", "drain_s": "3"})
    assert bridge_config(own, {}) == BridgeConfig(drain_s=3.0)


def test_an_engine_setting_of_its_own_would_make_a_second_engine_and_is_refused(sharing: Path) -> None:
    with pytest.raises(ConfigError, match=r"^setting 'page_size' belongs to the model 'llm', whose engine this"):
        engine_config(initialize_args(sharing, {"engine_of": "llm", "page_size": "8"}), {})


@pytest.mark.parametrize("content", [None, "parameters {"])
def test_an_owner_that_can_not_be_read_is_one_sentence(sharing: Path, content: str | None) -> None:
    file = sharing.parent / "llm" / "config.pbtxt"
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(ConfigError, match=r"config\.pbtxt, whose engine this model shares, can not be read"):
        engine_config(initialize_args(sharing, {"engine_of": "llm"}), {})
