"""Triton's `initialize` arguments → `EngineConfig`.

Where it stands in the flow: the bridge calls this once when it starts. Later layers win: the model's `1/model.json`,
the `parameters` of its config.pbtxt, the environment variable MINISGL_SETTINGS.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minisgl_backend.config import EngineConfig, parse_setting, read_settings, resolve_config


def engine_config(args: Mapping[str, str], environment: Mapping[str, str]) -> EngineConfig:
    """`args` are those of `TritonPythonModel.initialize`. Raises ConfigError, naming the setting."""
    model_json = Path(args["model_repository"]) / args["model_version"] / "model.json"
    return resolve_config(
        read_settings(model_json, {}),
        _of_model_config(json.loads(args["model_config"])),
        read_settings(None, environment),
    )


def _of_model_config(model_config: Mapping[str, Any]) -> dict[str, Any]:
    """The `parameters` of config.pbtxt, all strings there. Names in capitals are Triton's (EXECUTION_ENV_PATH)."""
    settings: dict[str, Any] = {}
    for key, value in model_config.get("parameters", {}).items():
        if not key.isupper():
            name, parsed = parse_setting(f"{key}={value.get('string_value', '')}")
            settings[name] = parsed
    return settings
