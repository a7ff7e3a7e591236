"""From settings to an executor: finds the model, reads its limits, chooses where the group runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from minisgl_backend.actors.executors.group import Executor, Say
from minisgl_backend.actors.executors.inline import InlineExecutor, Rank
from minisgl_backend.actors.executors.process import ProcessExecutor
from minisgl_backend.actors.worker import Compute, in_thread
from minisgl_backend.config import EngineConfig
from minisgl_backend.models.limits import context_limit
from minisgl_backend.models.locate import locate_model
from minisgl_backend.scheduler.limits import Limits


def make_executor(config: EngineConfig, run_dir: Path) -> Executor:
    """Raises StartError: the model is not there, or is one we do not run."""
    folder = locate_model(config.model)
    context_tokens = context_limit(config, folder)
    if config.executor == "process":
        return ProcessExecutor(config, folder, context_tokens, run_dir)
    return InlineExecutor(_inline_rank(config, folder), lambda pages: make_limits(config, pages, context_tokens))


def make_limits(config: EngineConfig, num_pages: int, context_tokens: int) -> Limits:
    """What the scheduler may use."""
    return Limits(
        max_running=config.max_running,
        token_budget=config.token_budget,
        page_size=config.page_size,
        num_pages=num_pages,
        context_tokens=context_tokens,
    )


def _inline_rank(config: EngineConfig, folder: Path) -> Callable[[Say], Rank]:
    def build(say: Say) -> Rank:
        from minisgl_backend.worker.build import build_runner

        runner = build_runner(config, folder, 0, say)
        runner.warm_up()
        return _RunnerRank(runner.num_pages, in_thread(runner.run), runner.close)

    return build


class _RunnerRank:
    def __init__(self, num_pages: int, compute: Compute, close: Callable[[], None]) -> None:
        self.num_pages = num_pages
        self.compute = compute
        self.close = close
