"""Sizes that do not fit together are refused at start-up, with a sentence that names them."""

from __future__ import annotations

import pytest

from minisgl_backend.errors import ConfigError
from minisgl_backend.scheduler.limits import Limits


def test_the_budget_must_hold_a_row_for_every_slot_and_a_page_of_prompt() -> None:
    Limits(max_running=8, token_budget=24, page_size=16, num_pages=1, context_tokens=1)
    with pytest.raises(ConfigError, match=r"token_budget must be at least max_running \+ page_size = 24, is 23"):
        Limits(max_running=8, token_budget=23, page_size=16, num_pages=1, context_tokens=1)


@pytest.mark.parametrize("name", ["max_running", "page_size", "num_pages", "context_tokens"])
def test_a_size_below_one_is_refused_by_name(name: str) -> None:
    sizes = {"max_running": 1, "token_budget": 99, "page_size": 1, "num_pages": 1, "context_tokens": 1, name: 0}
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, got 0"):
        Limits(**sizes)
