"""A client that is there to be killed: `python -m load.hold HOST:PORT COUNT` opens so many connections, streams on
each, and prints one line when all of them are in the middle of an answer. Then it goes on reading until it dies.

A killed process says goodbye to nobody: the kernel drops its connections, as a crashed client's or a lost network's.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

from load.streams import MODEL, connection, inputs

MAX_TOKENS = 8000


async def hold(url: str, count: int) -> None:
    """Returns only when an answer ends, which is too early."""
    begun = 0

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {
            "model_name": MODEL,
            "inputs": inputs("the cat", stream=True, sampling_parameters={"max_tokens": MAX_TOKENS}),
        }

    async def stream() -> None:
        nonlocal begun
        async with connection(url) as client:
            pieces = 0
            async for _, error in client.stream_infer(requests()):
                if error is not None:
                    raise error
                pieces += 1
                begun += pieces == 1
                if begun == count and pieces == 1:
                    print("all are in the middle of an answer", flush=True)

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(stream())


if __name__ == "__main__":
    asyncio.run(hold(sys.argv[1], int(sys.argv[2])))
