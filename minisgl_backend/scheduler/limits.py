"""The sizes that the scheduler keeps to, fixed for the life of an engine group.

Where it stands in the flow: made by the scheduler actor from `EngineConfig` and the pool's size (`Begin`), once.
"""

from __future__ import annotations

import msgspec

from minisgl_backend.errors import ConfigError


class Limits(msgspec.Struct, frozen=True):
    """Raises ConfigError when the sizes do not fit together."""

    max_running: int  # slots: sequences with a row in a step
    token_budget: int  # tokens computed in one step
    page_size: int  # tokens per KV page
    num_pages: int  # pages of the KV pool
    context_tokens: int  # prompt + output of one sequence

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        need = self.max_running + self.page_size
        if self.token_budget < need:
            raise ConfigError(f"token_budget must be at least max_running + page_size = {need}, is {self.token_budget}")

    @property
    def pool_tokens(self) -> int:
        """Tokens whose K/V the pool holds."""
        return self.num_pages * self.page_size
