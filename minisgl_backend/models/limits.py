"""The context limit of an engine, from its settings and its model: one number for text, scheduler and worker."""

from __future__ import annotations

from pathlib import Path

from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import ConfigError
from minisgl_backend.models.folder import read_model_spec


def context_limit(config: EngineConfig, folder: Path) -> int:
    """Prompt + output of one sequence, in tokens: the setting context_tokens, or the model's own limit when that is 0.

    Reads the folder's config.json. Raises ConfigError when the setting is beyond what the model was made for, and
    whatever `read_model_spec` raises.
    """
    own = read_model_spec(folder).context_tokens
    if config.context_tokens > own:
        raise ConfigError(f"setting 'context_tokens' is {config.context_tokens}, but the model ends at {own} tokens")
    return config.context_tokens or own
