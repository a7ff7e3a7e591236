"""The context limit of an engine, from its settings and its model: one number for text, scheduler and worker."""

from __future__ import annotations

from pathlib import Path

from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import ConfigError
from minisgl_backend.models.folder import read_model_spec


def context_limit(config: EngineConfig, folder: Path) -> int:
    """Prompt + output of one sequence, in tokens: the setting context_tokens, or the model's own limit when that is 0.

    A setting may go beyond the model's own limit where its rotary embedding can be stretched, see
    `RopeSpec.settable_tokens`. Reads the folder's config.json. Raises ConfigError when it is beyond that, and whatever
    `read_model_spec` raises.
    """
    spec = read_model_spec(folder)
    own = spec.context_tokens
    most = min((rope.settable_tokens(own) for rope in spec.ropes), default=own)
    if config.context_tokens > most:
        raise ConfigError(f"setting 'context_tokens' is {config.context_tokens}, but the model ends at {most} tokens")
    return config.context_tokens or own
