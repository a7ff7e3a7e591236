"""A whole answer by either of our clients, each on a connection of its own."""

from __future__ import annotations

import asyncio
from typing import Any

from minisgl_client.aio import AsyncClient
from minisgl_client.client import Client
from minisgl_client.pieces import Answer


def generate_sync(url: str, **fields: Any) -> Answer:
    """By `Client`."""
    with Client(url) as client:
        return client.generate(**fields)


def generate_async(url: str, **fields: Any) -> Answer:
    """By `AsyncClient`, in a loop of its own."""

    async def generate() -> Answer:
        async with AsyncClient(url) as client:
            return await client.generate(**fields)

    return asyncio.run(generate())
