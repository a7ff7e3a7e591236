"""The gateway in this process, in front of a server that a test speaks for, asked without a network."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from fakes.inference_server import InferenceServer
from minisgl_client.aio import AsyncClient
from minisgl_client.gateway.app import build_app
from minisgl_client.gateway.backends import Backend, Backends
from minisgl_client.gateway.settings import GatewaySettings


@asynccontextmanager
async def gateway(
    server: InferenceServer, timeout_s: float | None = None, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    async with AsyncClient(server.url) as client:
        app = build_app(GatewaySettings(**settings), Backends(Backend(client, timeout_s)))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            yield http


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """OpenAI's shape, whatever went wrong."""
    body = answer.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}
    return dict(body["error"])
