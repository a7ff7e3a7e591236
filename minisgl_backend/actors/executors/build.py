"""From settings and a model to an executor: reads the model's limits, chooses where the group runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from minisgl_backend.actors.executors.group import Executor, Say
from minisgl_backend.actors.executors.inline import InlineExecutor, Rank
from minisgl_backend.actors.executors.process import ProcessExecutor
from minisgl_backend.actors.step_trace import begin_trace
from minisgl_backend.actors.worker import Compute, in_thread
from minisgl_backend.config import EngineConfig
from minisgl_backend.device.machine import read_machine
from minisgl_backend.device.placement import place
from minisgl_backend.distributed.seat import ALONE
from minisgl_backend.messages.plan import BatchPlan
from minisgl_backend.models.folder import read_model_spec
from minisgl_backend.models.limits import context_limit
from minisgl_backend.models.ranks import check_ranks
from minisgl_backend.scheduler.limits import Limits
from minisgl_backend.scheduler.scheduler import Scheduler
from minisgl_backend.worker.runner import Launched, StepRunner


def make_executor(config: EngineConfig, folder: Path, run_dir: Path) -> Executor:
    """folder: of the model. Raises StartError: it is one we do not run, or a wrong setting."""
    inline = config.executor == "inline"
    ranks = config.tensor_parallel
    check_ranks(read_model_spec(folder), ranks, config.quantization)
    placement = place(read_machine(), threads=config.threads, cpu_cores=config.cpu_cores, ranks=ranks, inline=inline)
    context_tokens = context_limit(config, folder)
    trace_file = begin_trace(config.step_trace)
    if not inline:
        return ProcessExecutor(config, folder, context_tokens, run_dir, placement)
    return InlineExecutor(
        _inline_rank(msgspec.structs.replace(config, threads=placement.workers[0].threads), folder),
        lambda pages: make_scheduler(config, pages, context_tokens),
        trace_file,
        placement.lines,
    )


def make_scheduler(config: EngineConfig, num_pages: int, context_tokens: int) -> Scheduler:
    """A fresh one for a group with so many KV pages."""
    return Scheduler(make_limits(config, num_pages, context_tokens), depth=int(config.overlap))


def make_limits(config: EngineConfig, num_pages: int, context_tokens: int) -> Limits:
    """What the scheduler may use."""
    return Limits(
        max_running=config.max_running,
        token_budget=config.token_budget,
        page_size=config.page_size,
        num_pages=num_pages,
        context_tokens=context_tokens,
        policy=config.policy,
        reserve=config.reserve,
        prefix_cache=config.prefix_cache,
        mixed=config.mixed,
        target_itl_ms=config.target_itl_ms,
        preempt=config.preempt,
    )


def _inline_rank(config: EngineConfig, folder: Path) -> Callable[[Say], Rank]:
    def build(say: Say) -> Rank:
        from minisgl_backend.worker.build import build_runner

        runner = build_runner(config, folder, ALONE, say, token_bytes_of(folder))
        runner.warm_up()
        return _RunnerRank(runner)

    return build


def token_bytes_of(folder: Path) -> Callable[[], list[bytes]]:
    """Reads, when it is called, what each id of the model's tokenizer adds to a text."""

    def read() -> list[bytes]:
        from minisgl_backend.text.tokenizer import Tokenizer

        tokenizer = Tokenizer.load(folder)
        return tokenizer.shown_bytes[: tokenizer.vocab_size]

    return read


class _RunnerRank:
    """A runner whose steps are launched in a thread; `close` waits for the launch that is under way."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self._busy = threading.Lock()
        self.num_pages = runner.num_pages
        self.compute: Compute = in_thread(self._launch)

    def _launch(self, plan: BatchPlan) -> Launched:
        with self._busy:
            return self._runner.launch(plan)

    def close(self) -> None:
        with self._busy:
            self._runner.close()
