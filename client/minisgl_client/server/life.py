"""The life of the tritonserver of `minisgl serve`: up, watched, started again when a part of it is lost, and down.

    launch ─► tritonserver ─┬► ready ─► gateway ─► watched ─► stop
              engine host ──┘  ▲                      │ a stub of ours, or the server, hangs
                               └── started again ◄────┘ (the engine stays, warm)

Where it stands in the flow: commands/serve.py settles everything and calls `live`, which returns when all is over.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from minisgl_backend.actors.start_times import FIRST_STAGE, stage_of
from minisgl_backend.actors.stopped import LOOK_EVERY_S, LOOKS, is_stopped
from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import StartError
from minisgl_client.server import gateway
from minisgl_client.server.errors import ServeError
from minisgl_client.server.health import is_ready, reachable_host, says_not_ready
from minisgl_client.server.log import ServerLog
from minisgl_client.server.process import Interrupts, ServerProcess
from minisgl_client.server.shared_memory import remove_regions
from minisgl_client.server.stubs import StubWatch
from minisgl_client.stages import Stages

MODEL = "minisgl"
_FINALIZE_S = 15  # that tritonserver may take for its end beside its own limit, for the model's finalize
_START_PATIENCE_S = 2  # for a server that has answered nobody yet: it hears no signal while it loads a model
_STARTS_AGAIN = 2  # when it loses a lock of its own
_LOSSES, _LOSSES_S = 5, 600.0  # parts lost in so long a time: something is wrong that no restart mends
_POLL_S = 0.1
_RETIRE_TRIES = 10


@dataclass(frozen=True)
class Launch:
    """All that is settled before tritonserver starts."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    config: EngineConfig  # what the model will run with
    exit_s: int  # tritonserver's own limit for its end after SIGTERM
    host: str
    ports: Mapping[str, int]  # by option
    openai_port: int | None  # of the gateway beside it
    regions: str  # prefix of its files in shared memory
    engine_beside: bool  # the server will load our model at its start: its engine may start meanwhile
    verbose: bool


def live(launch: Launch, stages: Stages) -> int:
    """The server from its start to its end, whoever ends it. Returns our exit code. Raises ServeError."""
    stages.begin("start", "tritonserver")
    with Interrupts() as interrupts:
        life = _Life(launch, stages, interrupts)
        try:
            life.come_up()
            life.serve()
        finally:
            ended = life.server.exit_code()
            graceful = life.end()
    if ended is not None and interrupts.count == 0:
        raise ServeError(_reason(life.log, ended))
    return 0 if life.ready and graceful else 130


class _Life:
    """One server after another under the same ports, until somebody wants none. Owns them, and the gateway beside."""

    def __init__(self, launch: Launch, stages: Stages, interrupts: Interrupts) -> None:
        self._launch = launch
        self._stages = stages
        self._interrupts = interrupts
        self._beside: ServerProcess | None = None
        self._watch: StubWatch | None = None  # of a server that is ready
        self._losses: deque[float] = deque(maxlen=_LOSSES)  # when (monotonic)
        self.ready = False
        self.server, self.log = self._start()

    def come_up(self) -> None:
        """Until everything is ready; `ready` stays False when the server ended or a signal came first."""
        launch, stages = self._launch, self._stages
        if launch.engine_beside:
            _start_engine(launch, stages)
        self._until_ready()
        if not self.ready:
            return
        if launch.openai_port is not None:
            stages.begin("gateway", "OpenAI's API")
            self._beside = _start_gateway(launch, launch.openai_port, self._interrupts)
        stages.end()
        print(greeting(stages.summary(), launch.host, launch.ports, launch.openai_port), flush=True)
        stages.begin("serve", "Ctrl-C stops it")

    def serve(self) -> None:
        """Until a signal comes, or the server ends by itself. Raises ServeError: what is beside it, or it itself, can
        not be kept alive.
        """
        while self.ready and self.server.exit_code() is None and not self._interrupts.wait(LOOK_EVERY_S):
            if self._beside is not None and (code := self._beside.exit_code()) is not None:
                raise ServeError(f"the OpenAI gateway ended with code {code}")
            if self._watch is not None and (lost := self._watch.look()) is not None:
                self._start_again(lost)

    def end(self) -> bool:
        """Stops all that runs. True when the server ended by itself and well."""
        launch, stages, ended = self._launch, self._stages, self.server.exit_code()
        if ended is None:
            stages.begin("stop", "waiting for the answers in flight; Ctrl-C again ends them" if self.ready else "")
        if self._beside is not None:
            self._beside.stop(gateway.STOP_S if ended is None else 0, self._interrupts, lambda: False)
        patience_s = launch.exit_s + _FINALIZE_S if self.ready else _START_PATIENCE_S
        graceful = self.server.stop(patience_s, self._interrupts, self.log.gave_up)
        if self.log.gave_up():
            stages.note(
                "tritonserver could not end: a client keeps a gRPC stream or HTTP connection open (docs/triton.md)"
            )
        remove_regions(launch.regions)
        _retire_engine(launch.config, self._interrupts, stages)
        return graceful

    def _start(self) -> tuple[ServerProcess, ServerLog]:
        launch = self._launch
        log = ServerLog(_show, lambda line: _tell(self._stages, line), verbose=launch.verbose)
        return ServerProcess(launch.command, launch.environment, log.take), log

    def _start_again(self, lost: str) -> None:
        """At once: clients that wait for a lost stub get a broken connection, the next ones find the warm engine."""
        self._replace_lost(lost)
        self._until_ready()
        if self.ready:
            self._stages.note("ready again")

    def _replace_lost(self, lost: str) -> None:
        """Raises ServeError: that has been too often."""
        now_s = time.monotonic()
        if len(self._losses) == _LOSSES and now_s - self._losses[0] < _LOSSES_S:
            raise ServeError(f"{lost}, after {_LOSSES} more in the last {_LOSSES_S:g} s: not started again")
        self._losses.append(now_s)
        self._stages.note(f"{lost}: tritonserver is killed and started again")
        self._replace()

    def _replace(self) -> None:
        self.server.stop(0, self._interrupts, self.log.gave_up)  # the stubs in its session, too
        remove_regions(self._launch.regions)
        self.server, self.log = self._start()

    def _until_ready(self) -> None:
        self.ready = self._answers()
        for _ in range(_STARTS_AGAIN):
            if self.ready or self.server.exit_code() != -signal.SIGABRT or not self.log.lost_a_lock():
                break
            self._stages.note("tritonserver lost a lock of its own while models started, and is started again")
            self._replace()
            self.ready = self._answers()

    def _answers(self) -> bool:
        """False when the server ended or a signal came first. Raises ServeError."""
        looks = 0  # in a row that found it stopped
        host, port = self._launch.host, self._launch.ports["--http-port"]
        while self.server.exit_code() is None:
            if is_ready(host, port, MODEL):
                self._watch = StubWatch(self.server.pid, partial(says_not_ready, host, port))
                return True
            looks = looks + 1 if is_stopped(self.server.pid) else 0
            if looks >= LOOKS:
                self._replace_lost("tritonserver was stopped by a signal as it started")
                looks = 0
            if self._interrupts.wait(_POLL_S):
                return False
        return False


def greeting(seconds: str, host: str, ports: Mapping[str, int], openai_port: int | None = None) -> str:
    """What to try now."""
    address = reachable_host(host)
    address = f"[{address}]" if ":" in address else address
    http, grpc = f"http://{address}:{ports['--http-port']}", f"{address}:{ports['--grpc-port']}"
    body = json.dumps({"text_input": "The capital of France is", "stream": True, "max_tokens": 32, "temperature": 0})
    gateway_url = f"http://{address}:{openai_port}"
    openai = "" if openai_port is None else f"  OpenAI   {gateway_url}/v1\n  page     {gateway_url}/\n"
    minisgl = shlex.quote(str(Path(sys.executable).parent / "minisgl"))  # not all who serve have it on their PATH
    return f"""
ready after {seconds}

  HTTP     {http}
  gRPC     {grpc}
  metrics  http://{address}:{ports["--metrics-port"]}/metrics
{openai}
  curl -sN {http}/v2/models/{MODEL}/generate_stream -d {shlex.quote(body)}
  {minisgl} generate --url {grpc} --max-tokens 32 --temperature 0 'The capital of France is'
  {minisgl} chat --url {grpc}
"""


def _start_engine(launch: Launch, stages: Stages) -> None:
    """The engine's host, while tritonserver starts: the model finds it there and waits for what is left.

    Without a lease it ends by itself. What goes wrong here is told by the model, which tries again.
    """
    from minisgl_backend.actors.launch import absolute, find_or_start

    try:
        find_or_start(absolute(launch.config), launch.environment)
    except (StartError, OSError) as error:
        stages.note(f"no engine yet: {error}")


def _start_gateway(launch: Launch, port: int, interrupts: Interrupts) -> ServerProcess:
    ports = (port, launch.ports["--grpc-port"], launch.ports["--metrics-port"])
    command = gateway.gateway_command(launch.host, *ports, MODEL)
    return gateway.start_gateway(command, os.environ, port, launch.host, interrupts, _show)


def _retire_engine(config: EngineConfig, interrupts: Interrupts, stages: Stages) -> None:
    """The engine outlives its server by a lease, for a restart; who stops on purpose wants no process left.

    Asks again for a second: the host may not have noticed yet that its holder is gone.
    """
    from minisgl_backend.actors.connection import retire
    from minisgl_backend.actors.launch import absolute
    from minisgl_backend.actors.rundir import engine_dir

    async def retired() -> bool:
        async with asyncio.timeout(config.lease_s + 5):
            return await retire(engine_dir(absolute(config)))

    try:
        for _ in range(_RETIRE_TRIES):
            if asyncio.run(retired()):
                return
            interrupts.wait(_POLL_S)
        stages.note("the engine stays: another server holds it")
    except Exception as error:  # a socket's, a timeout: the server has ended, and its exit code must not change
        reason = str(error) or type(error).__name__
        stages.note(f"the engine does not answer ({reason}); without a holder it ends within {config.lease_s:g} s")


def _reason(log: ServerLog, exit_code: int) -> str:
    if failure := log.failure():
        return failure
    return "\n".join([*log.tail(), f"minisgl: tritonserver ended with code {exit_code}; its last lines are above"])


def _tell(stages: Stages, line: str) -> None:
    """A line of the engine, under the stage it belongs to."""
    if stages.current in ("serve", "stop") or line.startswith("ready"):
        stages.note(line)
    elif not line.startswith("engine"):  # its being ready has just been said
        stages.begin(stage_of(line) or (FIRST_STAGE if stages.current == "start" else stages.current), line)


def _show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
