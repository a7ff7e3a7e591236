"""Triton's `initialize` arguments → `EngineConfig`, and the bridge's own `BridgeConfig`.

Where it stands in the flow: the bridge calls this once when it starts. Later layers win: the model's `1/model.json`,
the `parameters` of its config.pbtxt, the environment variable MINISGL_SETTINGS. The bridge's settings stand in the
same places but are no engine's: two models with different ones share an engine.

A model of another dialect has no engine settings of its own: the parameter `engine_of` of its config.pbtxt names the
model of the same repository whose settings it takes, so that the two can not disagree, which would put two engines
into memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from minisgl_backend.config import EngineConfig, nearest, parse_setting, read_settings, resolve_config
from minisgl_backend.errors import ConfigError
from minisgl_backend.serving import pbtxt


class BridgeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a Triton model, beside those of its engine."""

    drain_s: float = 20.0  # how long answers in flight may go on when the model is unloaded or the server stops


_LONGEST_DRAIN_S = 86400.0
_ENGINE_OF = "engine_of"


def engine_config(args: Mapping[str, str], environment: Mapping[str, str]) -> EngineConfig:
    """`args` are those of `TritonPythonModel.initialize`. Raises ConfigError, naming the setting."""
    merged = _merged(args, environment)
    return resolve_config({key: value for key, value in merged.items() if key not in BridgeConfig.__struct_fields__})


def bridge_config(args: Mapping[str, str], environment: Mapping[str, str]) -> BridgeConfig:
    """As `engine_config`, for the bridge's own settings."""
    merged = _merged(args, environment)
    own = {key: value for key, value in merged.items() if key in BridgeConfig.__struct_fields__}
    try:
        config = msgspec.convert(own, BridgeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"setting has a wrong value: {error}") from None
    if not 0.0 <= config.drain_s <= _LONGEST_DRAIN_S:
        raise ConfigError(f"setting 'drain_s' must be from 0 to {_LONGEST_DRAIN_S:g}, got {config.drain_s!r}")
    return config


def _merged(args: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, Any]:
    """All places' settings. Raises ConfigError for an unknown key, naming the nearest known one."""
    folder = Path(args["model_repository"])
    strings = model_parameters(json.loads(args["model_config"]))
    if owner := strings.pop(_ENGINE_OF, ""):
        if taken := sorted(set(strings) - set(BridgeConfig.__struct_fields__)):
            raise ConfigError(f"setting {taken[0]!r} belongs to the model {owner!r}, whose engine this model shares")
        folder = folder.parent / owner
        strings = {**_parameters_of(folder), **strings}
    merged = read_settings(folder / args["model_version"] / "model.json", {})
    merged.update(parse_setting(f"{key}={value}") for key, value in strings.items())
    merged.update(read_settings(None, environment))
    known = (*EngineConfig.__struct_fields__, *BridgeConfig.__struct_fields__)
    for key in merged:
        if key not in known:
            raise ConfigError(f"unknown setting {key!r}{nearest(key, known)}")
    return merged


def model_parameters(model_config: Mapping[str, Any]) -> dict[str, str]:
    """The `parameters` of config.pbtxt, all strings there. Names in capitals are Triton's (EXECUTION_ENV_PATH)."""
    parameters = model_config.get("parameters", {}).items()
    return _without_tritons({key: value.get("string_value", "") for key, value in parameters})


def _parameters_of(folder: Path) -> dict[str, str]:
    """Those of another model, by its folder. Raises ConfigError when they can not be read."""
    file = folder / "config.pbtxt"
    try:
        return _without_tritons(pbtxt.parameters(file.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}, whose engine this model shares, can not be read: {error}") from None


def _without_tritons(parameters: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in parameters.items() if not key.isupper()}
