"""A whole answer by either of our clients, each on a connection of its own; and the stream of a tritonclient."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from load.serving import PATIENCE_S
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


@contextmanager
def results_of(client: Any) -> Iterator[Callable[[], Any]]:
    """Of a synchronous gRPC client of Triton, whose stream it starts and stops; a function that waits for the next
    result, and raises the next error.
    """
    came: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(callback=lambda result, error: came.put((result, error)))

    def result() -> Any:
        result, error = came.get(timeout=PATIENCE_S)
        if error is not None:
            raise error
        return result

    try:
        yield result
    finally:
        client.stop_stream()


def is_final(result: Any) -> bool:
    """Of a result that `results_of` gave."""
    return bool(result.get_response().parameters["triton_final_response"].bool_param)
