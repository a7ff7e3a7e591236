"""The gateway's process: a loop of uvloop, one listening socket, an end that lets answers finish."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
import sys
from types import FrameType

import uvicorn
import uvloop

from minisgl_client.aio import AsyncClient
from minisgl_client.gateway.app import build_app
from minisgl_client.gateway.backends import Backend, Backends
from minisgl_client.gateway.heads import MAX_CONNECTIONS, BoundedHeads
from minisgl_client.gateway.settings import BACKLOG, GatewaySettings

_OTHER_FILES = 256  # of the loop, the connection to Triton, the page


def serve(settings: GatewaySettings, listener: socket.socket, drain_s: int) -> None:
    """Until SIGTERM or SIGINT: then nobody new is let in, answers in flight may go on for drain_s, and the rest is
    cut. A second signal cuts them at once. Main thread only.
    """
    _log_to_stderr()
    _allow_files(MAX_CONNECTIONS + _OTHER_FILES)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, listener, drain_s))


async def _serve(settings: GatewaySettings, listener: socket.socket, drain_s: int) -> None:
    async with AsyncClient(settings.url, model=settings.model) as client:
        app = build_app(settings, Backends(Backend(client, settings.timeout_s)), lambda: server.should_exit)
        config = uvicorn.Config(
            app,
            http=BoundedHeads,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=drain_s,
        )
        server = _Server(config)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, server.heard_outside)
        await server.serve(sockets=[listener])


class _Server(uvicorn.Server):
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Any second signal means: at once."""
        if self.should_exit:
            self.force_exit = True
        super().handle_exit(sig, frame)

    def heard_outside(self, sig: int, frame: FrameType | None) -> None:
        """For signals before uvicorn listens to them; those that it took it hands on at its end."""
        self.should_exit = True


def _allow_files(count: int) -> None:
    """As far as the system lets it: what a shell gives at first is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # of its start and end we tell ourselves
