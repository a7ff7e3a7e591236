"""The context limit of an engine, from its settings and its model: one number for text, scheduler and worker; and what
it takes for itself.
"""

from __future__ import annotations

from pathlib import Path

from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import ConfigError
from minisgl_backend.models.folder import read_model_spec
from minisgl_backend.models.spec import ModelSpec


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


def context_bytes(config: EngineConfig, spec: ModelSpec, context_tokens: int) -> int:
    """What a worker holds for every position there may be: rotary tables, and of each slot tokens and page numbers."""
    pages = -(-context_tokens // config.page_size)
    return sum(rope.table_bytes(context_tokens) for rope in spec.ropes) + 4 * config.max_running * (
        context_tokens + pages
    )


def check_context_fits(config: EngineConfig, spec: ModelSpec, context_tokens: int, free_bytes: int) -> None:
    """Raises ConfigError when it does not: a config.json may state any limit."""
    need = context_bytes(config, spec, context_tokens)
    if need > free_bytes:
        raise ConfigError(
            f"sequences of up to {context_tokens:,} tokens take {need:,} bytes of tables, but {free_bytes:,} are free; "
            "lower 'context_tokens'"
        )
