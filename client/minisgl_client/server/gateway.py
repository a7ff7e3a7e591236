"""The OpenAI gateway beside a tritonserver: a process of its own, started when the server is ready, ended before it.

Where it stands in the flow: `minisgl serve --openai` checks with `check_gateway` what can be checked before anything
slow begins, and `start_gateway` is what it starts last.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping

from minisgl_client.gateway.settings import read_api_keys
from minisgl_client.server.errors import ServeError
from minisgl_client.server.health import reachable_host, status_of
from minisgl_client.server.process import Interrupts, ServerProcess

OPTION = "--openai"

STOP_S = 25  # its drain, and a little more
_PACKAGES = ("httptools", "starlette", "uvicorn", "uvloop")
_COMMAND = "from minisgl_client.cli import main; raise SystemExit(main())"
_POLL_S = 0.05


def check_gateway(environment: Mapping[str, str]) -> None:
    """Raises ServeError or ConfigError where it could not start."""
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        raise ServeError(f"{OPTION}: {', '.join(missing)} not installed: pip install 'minisgl-triton[gateway]'")
    read_api_keys(None, environment)


def gateway_command(host: str, port: int, grpc_port: int, metrics_port: int, model: str) -> list[str]:
    """For a server that listens on the same host."""
    address = reachable_host(host)
    address = f"[{address}]" if ":" in address else address
    urls = [f"--url={address}:{grpc_port}", f"--metrics-url=http://{address}:{metrics_port}/metrics"]
    options = [f"--host={host}", f"--port={port}", f"--model={model}", *urls]
    return [sys.executable, "-P", "-c", _COMMAND, "gateway", *options]


def start_gateway(
    command: list[str],
    environment: Mapping[str, str],
    port: int,
    host: str,
    interrupts: Interrupts,
    show: Callable[[str], None],
) -> ServerProcess:
    """Running, and listening unless a signal came first. show gets its log. Raises ServeError when it ends."""
    process = ServerProcess(command, environment, show)
    try:
        while status_of(host, port, "/health") is None:
            if (code := process.exit_code()) is not None:
                raise ServeError(f"the OpenAI gateway ended with code {code}; its lines are above")
            if interrupts.wait(_POLL_S):
                break
    except BaseException:
        process.stop(0, interrupts, lambda: True)
        raise
    return process
