"""Every setting of the scheduler reaches it, and those that would be ignored are refused."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl_backend.actors.executors.build import make_limits
from minisgl_backend.config import EngineConfig, resolve_config
from minisgl_backend.errors import ConfigError
from minisgl_backend.scheduler.limits import Limits

OTHER: dict[str, Any] = {
    "max_running": 7,
    "token_budget": 100,
    "page_size": 8,
    "policy": "priority",
    "reserve": "full",
    "prefix_cache": False,
    "mixed": False,
    "preempt": True,
}


def test_each_setting_that_both_have_is_handed_on() -> None:
    common = set(Limits.__struct_fields__) & set(EngineConfig.__struct_fields__)
    assert common == {*OTHER, "target_itl_ms", "context_tokens"}
    for settings in (OTHER, {"target_itl_ms": 30.0}):
        limits = make_limits(resolve_config(settings), 50, 60)
        assert {name: getattr(limits, name) for name in settings} == settings
    assert (limits.num_pages, limits.context_tokens) == (50, 60), "as the model and the pool allow"


def test_the_defaults_are_the_same_in_both() -> None:
    limits = make_limits(EngineConfig(), 50, 60)
    plain = Limits(limits.max_running, limits.token_budget, limits.page_size, 50, 60)
    assert limits == plain


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"preempt": True}, "'preempt' needs 'policy' to be \"priority\", it is 'fcfs'"),
        ({"target_itl_ms": 5.0, "mixed": False}, "'target_itl_ms' needs 'mixed'"),
        ({"target_itl_ms": -1.0}, "'target_itl_ms' must be from 0 to 60000, got -1.0"),
        ({"policy": "shortest"}, "Invalid enum value 'shortest' - at `\\$.policy`"),
        ({"reserve": "none"}, "Invalid enum value 'none' - at `\\$.reserve`"),
        ({"reasoning_parser": "r1"}, "'reasoning_parser' must be one of auto, none, think, got 'r1'"),
        ({"tool_parser": ""}, "'tool_parser' must be one of auto, none, hermes, llama3, mistral, got ''"),
        ({"polcy": "fcfs"}, "did you mean 'policy'"),
        ({"attention": "flash"}, "'attention' must be one of auto, native, torch, triton, flashinfer, or two of"),
        ({"attention": "triton,torch"}, "as in \"flashinfer,triton\" \\(prompts, decode rows\\), got 'triton,torch'"),
        ({"attention": "triton,triton,triton"}, "got 'triton,triton,triton'"),
    ],
)
def test_what_can_not_be_is_refused_by_name(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve_config(settings)
