"""`minisgl serve`: a tritonserver with our model, from the settings to the first answer, and down again.

    settings ─► tritonserver, ports, model ─► run folder, environment ─┬► tritonserver ─┬► ready ─► … ─► stop
               (all that can be wrong is                              └► engine host ──┘ progress from
                refused before it starts)                                                the server's log

The settings reach the model in the environment variable MINISGL_SETTINGS: nothing in the model repository is edited.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minisgl_backend.config import SETTINGS_VARIABLE, EngineConfig, parse_setting, read_settings
from minisgl_backend.errors import ConfigError
from minisgl_backend.models.folder import read_model_spec
from minisgl_backend.models.limits import context_limit
from minisgl_backend.models.locate import FETCHABLE, fetched_folder, locate_model
from minisgl_backend.models.ranks import check_ranks
from minisgl_backend.serving import settings as triton_settings
from minisgl_client.commands.fetch import fetch_model
from minisgl_client.gateway.settings import DEFAULT_PORT
from minisgl_client.server import gateway
from minisgl_client.server.errors import ServeError
from minisgl_client.server.installation import (
    Installation,
    default_repository,
    find_installation,
    server_environment,
)
from minisgl_client.server.life import MODEL, Launch, live
from minisgl_client.server.ports import claimed_ports
from minisgl_client.server.shared_memory import backend_option, new_prefix
from minisgl_client.stages import Stages

_EXIT_S = 10  # how much longer tritonserver may take for its end than the answers in flight (setting drain_s)


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
        return live(
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


def settings_of(arguments: argparse.Namespace, repository: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings to pass on: those of MINISGL_SETTINGS under those of the command line.

    Checked together with the repository's own, so that a wrong one is refused here. Raises ConfigError.
    """
    given = read_settings(None, environment)
    given.update(parse_setting(text) for text in arguments.set)
    given.update({key: value for key in ("model", "dtype") if (value := getattr(arguments, key)) is not None})
    if engine_config(repository, given).end_server_with_stub:
        raise ConfigError(
            "setting 'end_server_with_stub' is for a tritonserver that something else starts again: `minisgl serve` "
            "would end with it, and by itself starts its server again; leave it false"
        )
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
    ModelUnsupported, or ConfigError for a context that is longer than the model's and for ranks that it does not take.
    """
    if config.device == "fake":
        return config.model
    if config.model in FETCHABLE and not fetched_folder(config.model).is_dir():
        stages.begin("fetch", config.model)
        fetch_model(config.model, lambda line: stages.begin(_fetch_stage(line), line))
    stages.begin("model", config.model)
    folder = locate_model(config.model)
    context_limit(config, folder)
    check_ranks(read_model_spec(folder), config.tensor_parallel, config.quantization)
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


def _fetch_stage(line: str) -> str:
    return "convert" if line.startswith("converting") else "fetch"


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
