"""`minisgl serve`: a tritonserver with our model, from the settings to the first answer, and down again.

    settings ─► tritonserver, ports, model ─► run folder, environment ─┬► tritonserver ─┬► ready ─► … ─► stop
               (all that can be wrong is                              └► engine host ──┘ progress from
                refused before it starts)                                                the server's log

The settings reach the model in the environment variable MINISGL_SETTINGS: nothing in the model repository is edited.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import math
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl_backend.actors.start_times import FIRST_STAGE, stage_of
from minisgl_backend.config import SETTINGS_VARIABLE, EngineConfig, parse_setting, read_settings
from minisgl_backend.errors import ConfigError, StartError
from minisgl_backend.models.limits import context_limit
from minisgl_backend.models.locate import FETCHABLE, fetched_folder, locate_model
from minisgl_backend.serving import settings as triton_settings
from minisgl_client.commands.fetch import fetch_model
from minisgl_client.gateway.settings import DEFAULT_PORT
from minisgl_client.server import gateway
from minisgl_client.server.errors import ServeError
from minisgl_client.server.health import is_ready, reachable_host
from minisgl_client.server.installation import (
    Installation,
    default_repository,
    find_installation,
    server_environment,
)
from minisgl_client.server.log import ServerLog
from minisgl_client.server.ports import claimed_ports
from minisgl_client.server.process import Interrupts, ServerProcess
from minisgl_client.server.shared_memory import backend_option, new_prefix, remove_regions
from minisgl_client.stages import Stages

MODEL = "minisgl"
_EXIT_S = 10  # how much longer tritonserver may take for its end than the answers in flight (setting drain_s)
_FINALIZE_S = 15  # more, for the model's finalize
_START_PATIENCE_S = 2  # for a server that has answered nobody yet: it hears no signal while it loads a model
_STARTS_AGAIN = 2
_POLL_S = 0.1
_RETIRE_TRIES = 10


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `serve` to the command line."""
    parser = commands.add_parser("serve", help="start tritonserver with a model", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add(
        "--model",
        help="smollm2, a Hugging Face folder, a .gguf file, or a hub id (default: the repository's 1/model.json)",
    )
    add("--dtype", choices=("auto", "bf16", "fp16", "fp32"), help="of weights and activations")
    add("--set", metavar="KEY=VALUE", action="append", default=[], help="any engine setting (docs/configuration.md)")
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen on; 0.0.0.0 opens the server to the network (%(default)s)",
    )
    add("--http-port", type=_port, default=8000, metavar="N", help="0 takes a free one (%(default)s)")
    add("--grpc-port", type=_port, default=8001, metavar="N", help="(%(default)s)")
    add("--metrics-port", type=_port, default=8002, metavar="N", help="(%(default)s)")
    add(gateway.OPTION, type=_port, nargs="?", const=DEFAULT_PORT, metavar="N",
        help=f"OpenAI's API beside it, on a port ({DEFAULT_PORT}; docs/openai.md)")  # fmt: skip
    add("--model-repository", type=Path, metavar="FOLDER", help="another repository that holds the model `minisgl`")
    add("--triton-option", metavar="OPTION", action="append", default=[],
        help="one more option of tritonserver, as in --triton-option=--model-control-mode=explicit")  # fmt: skip
    add("--verbose", action="store_true", help="show all of tritonserver's log")
    parser.set_defaults(run=run)


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


def run(arguments: argparse.Namespace) -> int:
    """Serves until Ctrl-C or SIGTERM. Raises StartError, whose message is one sentence."""
    stages = Stages()
    repository = _repository(arguments.model_repository)
    settings = settings_of(arguments, repository, os.environ)
    installation = find_installation(os.environ)
    environment = server_environment(installation, os.environ)
    if missing := installation.missing_libraries(environment):
        raise ServeError(f"shared libraries are missing: {', '.join(missing)}; `make system-deps` installs them")
    wanted = {f"--{name}-port": getattr(arguments, f"{name}_port") for name in ("http", "grpc", "metrics")}
    if arguments.openai is not None:
        gateway.check_gateway(os.environ)
        wanted[gateway.OPTION] = arguments.openai
    with (
        claimed_ports(arguments.host, wanted) as ports,
        tempfile.TemporaryDirectory(prefix="minisgl-serve-") as folder,
    ):
        openai_port = ports.pop(gateway.OPTION, None)
        model = prepare_model(engine_config(repository, settings), stages)
        if "model" in settings:  # else the repository names it, and goes on doing so
            settings["model"] = model
        environment[SETTINGS_VARIABLE] = json.dumps(settings)
        config = engine_config(repository, settings)
        exit_s = math.ceil(bridge_config(repository, settings).drain_s) + _EXIT_S
        command = server_command(installation, Path(folder), repository, arguments.host, ports, exit_s)
        regions = new_prefix()
        command += [backend_option(regions), *arguments.triton_option]
        loads_all = not any(option.startswith("--model-control-mode") for option in arguments.triton_option)
        return _live(
            Launch(
                tuple(command),
                environment,
                config,
                exit_s,
                arguments.host,
                ports,
                openai_port,
                regions,
                engine_beside=loads_all,
                verbose=arguments.verbose,
            ),
            stages,
        )


def _live(launch: Launch, stages: Stages) -> int:
    """The server from its start to its end, whoever ends it. Returns our exit code; see `run`."""
    stages.begin("start", "tritonserver")
    log = ServerLog(_show, lambda line: _tell(stages, line), verbose=launch.verbose)
    ready, beside = False, None
    with Interrupts() as interrupts:
        server = ServerProcess(launch.command, launch.environment, log.take)
        try:
            if launch.engine_beside:
                _start_engine(launch, stages)
            ready = _until_ready(server, interrupts, launch)
            for _ in range(_STARTS_AGAIN):
                if ready or server.exit_code() != -signal.SIGABRT:
                    break
                server.stop(0, interrupts, log.gave_up)  # ends the stubs in its session, and reads its last lines
                if not log.lost_a_lock():
                    break
                stages.note("tritonserver lost a lock of its own while models started, and is started again")
                remove_regions(launch.regions)
                log = ServerLog(_show, lambda line: _tell(stages, line), verbose=launch.verbose)
                server = ServerProcess(launch.command, launch.environment, log.take)
                ready = _until_ready(server, interrupts, launch)
            if ready:
                if launch.openai_port is not None:
                    stages.begin("gateway", "OpenAI's API")
                    beside = _start_gateway(launch, launch.openai_port, interrupts)
                stages.end()
                print(greeting(stages.summary(), launch.host, launch.ports, launch.openai_port), flush=True)
                stages.begin("serve", "Ctrl-C stops it")
                while server.exit_code() is None and not interrupts.wait(_POLL_S):
                    if beside is not None and (code := beside.exit_code()) is not None:
                        raise ServeError(f"the OpenAI gateway ended with code {code}")
        finally:
            ended = server.exit_code()
            if ended is None:
                stages.begin("stop", "waiting for the answers in flight; Ctrl-C again ends them" if ready else "")
            if beside is not None:
                beside.stop(gateway.STOP_S if ended is None else 0, interrupts, lambda: False)
            patience_s = launch.exit_s + _FINALIZE_S if ready else _START_PATIENCE_S
            graceful = server.stop(patience_s, interrupts, log.gave_up)
            if log.gave_up():
                stages.note(
                    "tritonserver could not end: a client keeps a gRPC stream or HTTP connection open (docs/triton.md)"
                )
            remove_regions(launch.regions)
            _retire_engine(launch.config, interrupts, stages)
    if ended is not None and interrupts.count == 0:
        raise ServeError(_reason(log, ended))
    return 0 if ready and graceful else 130


def settings_of(arguments: argparse.Namespace, repository: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings to pass on: those of MINISGL_SETTINGS under those of the command line.

    Checked together with the repository's own, so that a wrong one is refused here. Raises ConfigError.
    """
    given = read_settings(None, environment)
    given.update(parse_setting(text) for text in arguments.set)
    given.update({key: value for key in ("model", "dtype") if (value := getattr(arguments, key)) is not None})
    engine_config(repository, given)
    bridge_config(repository, given)
    return given


def engine_config(repository: Path, settings: Mapping[str, Any]) -> EngineConfig:
    """What the model will run with: the repository's `1/model.json` and `config.pbtxt` under `settings`.

    Resolved by the very function that the model calls. Raises ConfigError.
    """
    return triton_settings.engine_config(*_places(repository, settings))


def bridge_config(repository: Path, settings: Mapping[str, Any]) -> triton_settings.BridgeConfig:
    """As `engine_config`, for the settings of the Triton model that are not the engine's."""
    return triton_settings.bridge_config(*_places(repository, settings))


def prepare_model(config: EngineConfig, stages: Stages) -> str:
    """Has the model in place and looks at it: fetches what can be fetched, refuses what can not run.

    Returns the setting `model` to pass on, which means the same from any working directory. Raises ModelNotFound,
    ModelUnsupported, or ConfigError for a context that is longer than the model's.
    """
    if config.device == "fake":
        return config.model
    if config.model in FETCHABLE and not fetched_folder(config.model).is_dir():
        stages.begin("fetch", config.model)
        fetch_model(config.model, lambda line: stages.begin(_fetch_stage(line), line))
    stages.begin("model", config.model)
    folder = locate_model(config.model)
    context_limit(config, folder)
    return str(folder) if Path(config.model).expanduser().exists() and config.model not in FETCHABLE else config.model


def server_command(
    installation: Installation, folder: Path, repository: Path, host: str, ports: Mapping[str, int], exit_s: int
) -> list[str]:
    """tritonserver's command line; lays the backends out in `folder` when the server is the wheel's."""
    command = [str(installation.binary), f"--model-repository={repository}", f"--exit-timeout-secs={exit_s}"]
    command += [f"--{protocol}-address={host}" for protocol in ("http", "grpc", "metrics")]
    command += [f"{option}={port}" for option, port in ports.items()]
    if backends := installation.lay_out_backends(folder / "backends"):
        command.append(f"--backend-directory={backends}")
    return command


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


def _places(repository: Path, settings: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """What Triton hands to the model, and the environment in which it will run, as far as they hold settings."""
    arguments = {
        "model_repository": str(repository / MODEL),
        "model_version": "1",
        "model_config": _model_config(repository / MODEL / "config.pbtxt"),
    }
    return arguments, {SETTINGS_VARIABLE: json.dumps(dict(settings))}


def _model_config(path: Path) -> str:
    """config.pbtxt as Triton hands it to the model: JSON."""
    from google.protobuf import json_format, text_format

    config = _model_config_messages().ModelConfig()
    try:
        text_format.Parse(path.read_text(encoding="utf-8"), config, allow_unknown_field=True)
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise ConfigError(f"{path} can not be read: {error}") from None
    return str(json_format.MessageToJson(config, preserving_proto_field_name=True))


def _model_config_messages() -> Any:
    """tritonclient's module of that name, by its file: the package around it imports grpc and numpy, a third of a
    second that nobody here needs.
    """
    package = importlib.util.find_spec("tritonclient")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'tritonclient'", name="tritonclient")
    file = Path(package.submodule_search_locations[0]) / "grpc" / "model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("tritonclient_model_config", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def _until_ready(server: ServerProcess, interrupts: Interrupts, launch: Launch) -> bool:
    """False when the server ended or a signal came first."""
    while server.exit_code() is None:
        if is_ready(launch.host, launch.ports["--http-port"], MODEL):
            return True
        if interrupts.wait(_POLL_S):
            return False
    return False


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


def _fetch_stage(line: str) -> str:
    return "convert" if line.startswith("converting") else "fetch"


def _tell(stages: Stages, line: str) -> None:
    """A line of the engine, under the stage it belongs to."""
    if stages.current in ("serve", "stop") or line.startswith("ready"):
        stages.note(line)
    elif not line.startswith("engine"):  # its being ready has just been said
        stages.begin(stage_of(line) or (FIRST_STAGE if stages.current == "start" else stages.current), line)


def _show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _repository(given: Path | None) -> Path:
    repository = (given or default_repository()).expanduser().absolute()
    if not (repository / MODEL / "config.pbtxt").is_file():
        raise ServeError(f"model repository {str(repository)!r} does not hold the model {MODEL!r}")
    return repository


def _port(text: str) -> int:
    port = int(text) if text.isdecimal() else -1
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"a port is a number from 0 to 65535, got {text!r}")
    return port
