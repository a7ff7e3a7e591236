"""The gateway's page in a browser: the gateway on a port of its own, in a thread; a page that remembers its faults."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import uvicorn
from playwright.sync_api import Browser, Page

from minisgl_client.aio import AsyncClient
from minisgl_client.gateway.app import build_app
from minisgl_client.gateway.backends import Backend, Backends
from minisgl_client.gateway.settings import GatewaySettings

PATIENCE_MS = 60_000
PHONE: Any = {"width": 360, "height": 740}


@contextmanager
def gateway_on_a_port(grpc_url: str, **settings: Any) -> Iterator[str]:
    """Its address. It ends, and its streams with it, when the block does."""
    listener = socket.create_server(("127.0.0.1", 0))
    servers: list[uvicorn.Server] = []
    made = Event()

    async def serve() -> None:
        async with AsyncClient(grpc_url) as client:
            backends = Backends(Backend(client, None))
            app = build_app(GatewaySettings(**settings), backends, lambda: servers[0].should_exit)
            config = uvicorn.Config(
                app, ws="none", lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1
            )
            servers.append(uvicorn.Server(config))
            made.set()
            await servers[0].serve(sockets=[listener])

    def run() -> None:
        try:
            asyncio.run(serve())
        finally:
            made.set()

    thread = Thread(target=run)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        made.wait()  # also when the block ends at once
        if servers:
            servers[0].should_exit = True
        thread.join()
        listener.close()


@contextmanager
def page_of(browser: Browser, **options: Any) -> Iterator[tuple[Page, list[str]]]:
    """A new page in a profile of its own, and what its console and its scripts complained of until now. A policy that
    was violated is told there, too. options: of the profile, such as `viewport`.
    """
    context = browser.new_context(**options)
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    faults: list[str] = []
    page.on("console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("dialog", lambda dialog: (faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    try:
        yield page, faults
    finally:
        context.close()


def runs_over(page: Page) -> int:
    """By how many pixels the page, or a view of it, is wider than the screen."""
    script = """() => Math.max(...[document.documentElement, ...document.querySelectorAll("main, #scroller, #sampling")]
        .filter((one) => one.clientWidth).map((one) => one.scrollWidth - one.clientWidth))"""
    return int(page.evaluate(script))


def snapshot(
    running: Sequence[dict[str, Any]] = (),
    waiting: Sequence[dict[str, Any]] = (),
    tree: Sequence[dict[str, Any]] = (),
    **more: Any,
) -> dict[str, Any]:
    """Of the engine, as GET /engine tells it."""
    times = {"p50": 12.5, "p90": 40.0, "p99": None}
    return {
        "state": "ready",
        "time_s": 0.0,
        "steps": 7,
        "running": list(running),
        "waiting": list(waiting),
        "tokens_per_s": 12.3,
        "ttft_ms": times,
        "itl_ms": times,
        "pages": {"total": 10, "free": 4, "tree_locked": 3, "tree_unlocked": 2, "private": 1, "quarantine": 0},
        "page_size": 16,
        "slots": {"total": 4, "free": 4 - len(running)},
        "cache": {"hit_tokens": 30, "prompt_tokens": 40, "evicted_pages": 5},
        "retractions": 6,
        "tree": list(tree),
        "left_out": {"running": 0, "waiting": 0, "tree": 0},
        "shows_prompts": True,
        **more,
    }


def running_row(id: str, output_tokens: int = 1) -> dict[str, Any]:
    return {
        "id": id,
        "prompt_tokens": 48,
        "cached_tokens": 16,
        "output_tokens": output_tokens,
        "max_tokens": 64,
        "age_s": 1.0,
        "pages": 4,
        "phase": "decode",
    }


def waiting_row(id: str) -> dict[str, Any]:
    return {"id": id, "prompt_tokens": 48, "age_s": 1.0, "priority": 0}


def tree_node(id: int, parent: int | None, tokens: int = 32, locks: int = 0, text: str | None = None) -> dict[str, Any]:
    return {"id": id, "parent": parent, "tokens": tokens, "locks": locks, "last_used_s": 1.0, "text": text}


def as_events(*objects: dict[str, Any]) -> str:
    return "".join(f"data: {json.dumps(one)}\n\n" for one in objects)
