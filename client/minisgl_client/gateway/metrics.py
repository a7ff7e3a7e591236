"""Triton's metrics, passed on as they are: the engine's are among them."""

from __future__ import annotations

import asyncio
import http.client
import urllib.error
import urllib.request

from minisgl_client.errors import Unavailable

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # Prometheus's

_TIMEOUT_S = 5.0


async def read_metrics(url: str) -> bytes:
    """Raises Unavailable."""
    return await asyncio.to_thread(_read, url)


def _read(url: str) -> bytes:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is beside us
    try:
        with direct.open(url, timeout=_TIMEOUT_S) as answer:
            return bytes(answer.read())
    except (urllib.error.URLError, http.client.HTTPException, OSError):
        raise Unavailable("the server does not tell its metrics now") from None
