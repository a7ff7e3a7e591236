"""`minisgl gateway`: OpenAI's API over HTTP, in front of a running server.

API keys are read from a file or from the environment variable MINISGL_API_KEYS; without any, whoever reaches the port
may ask.
"""

from __future__ import annotations

import argparse
import ipaddress
import math
import os
import socket
import sys
from pathlib import Path

from minisgl_backend.errors import ConfigError
from minisgl_client.gateway.settings import BACKLOG, DEFAULT_PORT, MAX_BODY_BYTES, GatewaySettings, read_api_keys

DRAIN_S = 20


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `gateway` to the command line."""
    parser = commands.add_parser(
        "gateway",
        help="OpenAI's API in front of a server",
        description=__doc__.split("\n")[0],
        allow_abbrev=False,  # --api-key would be --api-keys, and a key would be taken for a file and told
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 opens it to the network (%(default)s)")
    add("--port", type=_port, default=DEFAULT_PORT, metavar="N", help="0 takes a free one (%(default)s)")
    add("--url", default="127.0.0.1:8001", metavar="HOST:PORT", help="gRPC of the server (%(default)s)")
    add("--metrics-url", default="", metavar="URL", help="of the server's metrics, to pass them on at /metrics")
    add("--model", default="minisgl", help="the model's name there (%(default)s)")
    add("--served-name", default="", metavar="NAME", help="the model's name in the API (default: the same)")
    add("--api-keys", type=Path, metavar="FILE", help="keys, one a line; also in MINISGL_API_KEYS")
    add("--allowed-host", action="append", default=[], metavar="NAME", help="a name it answers to (docs/openai.md)")
    add("--cors-origin", action="append", default=[], metavar="ORIGIN", help="whose pages may ask; * lets all")
    add("--max-body", type=_positive, default=MAX_BODY_BYTES, metavar="BYTES", help="of a request (%(default)s)")
    add("--no-engine-view", action="store_true", help="do not tell at /engine what the engine does")
    add("--timeout", type=_seconds, metavar="SECONDS", help="an answer that takes longer is given up (default: none)")
    add("--drain", type=_positive, default=DRAIN_S, metavar="SECONDS", help="for answers at the end (%(default)s)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serves until Ctrl-C or SIGTERM. Raises ConfigError."""
    from minisgl_client.gateway.run import serve

    api_keys = read_api_keys(arguments.api_keys, os.environ)
    with _listener(arguments.host, arguments.port) as listener:
        host, port = listener.getsockname()[:2]
        alone = not api_keys and ipaddress.ip_address(host).is_loopback  # then its names are known, and only they guard
        settings = GatewaySettings(
            url=arguments.url,
            metrics_url=arguments.metrics_url,
            model=arguments.model,
            served_name=arguments.served_name,
            api_keys=api_keys,
            hosts=tuple(arguments.allowed_host) if arguments.allowed_host or alone else None,
            origins=tuple(arguments.cors_origin),
            max_body_bytes=arguments.max_body,
            timeout_s=arguments.timeout,
            engine_view=not arguments.no_engine_view,
        )
        address = f"[{host}]" if ":" in host else host
        guard = "with API keys" if settings.api_keys else "without API keys: whoever reaches it may ask"
        print(f"OpenAI API at http://{address}:{port}/v1 for {settings.url}, {guard}", file=sys.stderr, flush=True)
        serve(settings, listener, arguments.drain)
    return 0


def _listener(host: str, port: int) -> socket.socket:
    """Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError):
        raise ConfigError(f"--host {host!r} is no address of this machine") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # TIME_WAIT is no obstacle
        listener.bind(address)
        listener.listen(BACKLOG)  # before anybody is told: who connects at once waits, and is not refused
    except OSError as error:
        listener.close()
        raise ConfigError(f"port {port} of {host!r} can not be taken: {error.strerror}") from None
    return listener


def _port(text: str) -> int:
    port = int(text) if text.isdecimal() else -1
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"a port is a number from 0 to 65535, got {text!r}")
    return port


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 2**31:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text!r}")
    return seconds
