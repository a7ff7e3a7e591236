"""The sizes and choices that the scheduler keeps to, fixed for the life of an engine group.

Where it stands in the flow: made by the scheduler actor from `EngineConfig` and the pool's size (`Begin`), once.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from minisgl_backend.errors import ConfigError
from minisgl_backend.scheduler.order import Policy

_SIZES = ("max_running", "token_budget", "page_size", "num_pages", "context_tokens")


class Limits(msgspec.Struct, frozen=True):
    """Raises ConfigError when the values do not fit together."""

    max_running: int  # slots: sequences with a row in a step
    token_budget: int  # tokens computed in one step
    page_size: int  # tokens per KV page
    num_pages: int  # pages of the KV pool
    context_tokens: int  # prompt + output of one sequence
    policy: Policy = "fcfs"  # who is admitted next
    reserve: Literal["learned", "full"] = "learned"  # room kept for the running; full: nobody is ever retracted
    prefix_cache: bool = True  # whether sequences share pages
    mixed: bool = True  # decode rows and prompt chunks in one step; False: prompts first, alone
    target_itl_ms: float = 0.0  # what a step with running streams should take at most; 0: no target
    preempt: bool = False  # policy "priority": a smaller priority takes slot and pages from a larger one

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        need = self.max_running + self.page_size
        if self.token_budget < need:
            raise ConfigError(f"token_budget must be at least max_running + page_size = {need}, is {self.token_budget}")
        if self.preempt and self.policy != "priority":
            raise ConfigError(f"preempt needs the policy 'priority', the policy is {self.policy!r}")
        if self.target_itl_ms and not self.mixed:
            raise ConfigError("target_itl_ms needs mixed: without mixed batches every prompt stops the running streams")

    @property
    def pool_tokens(self) -> int:
        """Tokens whose K/V the pool holds."""
        return self.num_pages * self.page_size
