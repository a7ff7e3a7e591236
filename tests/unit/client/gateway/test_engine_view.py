"""What the engine does, at /engine: asked once for all who look on, and not at all when nobody does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
import pytest

from fakes.gateway import error_of, gateway
from fakes.inference_server import InferenceServer, aborts, inputs_of, pieces, response, says
from minisgl_client.gateway.engine_view import EVERY_S, EngineView
from minisgl_client.gateway.errors import ApiError
from minisgl_client.gateway.shared import KEPT_S

SNAPSHOT = {"state": "ready", "running": []}


class World:
    """The server and the time, as a test has them."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.asked = 0
        self.answers = asyncio.Event()
        self.answers.set()
        self.error: ApiError | None = None
        self.ending = False
        self.view = EngineView(self.ask, lambda: self.ending, lambda: self.now_s, self.wait)

    async def ask(self) -> Any:
        self.asked += 1
        number = self.asked
        await self.answers.wait()
        if self.error is not None:
            raise self.error
        return {"number": number}

    async def wait(self, seconds: float) -> None:
        self.now_s += seconds
        await asyncio.sleep(0)


async def some(events: AsyncIterator[bytes], count: int) -> list[Any]:
    return [json.loads((await anext(events)).removeprefix(b"data: ")) for _ in range(count)]


async def test_all_who_ask_at_once_share_a_question_and_those_shortly_after_its_answer() -> None:
    world = World()
    world.answers.clear()
    asking = [asyncio.create_task(world.view.snapshot()) for _ in range(50)]
    await asyncio.sleep(0)
    asking[0].cancel()  # the one who asked leaves, and the others get their answer
    await asyncio.sleep(0)
    world.answers.set()
    assert {json.loads(told)["number"] for told in await asyncio.gather(*asking[1:])} == {1}
    world.now_s += KEPT_S * 0.9
    assert json.loads(await world.view.snapshot())["number"] == 1
    world.now_s += KEPT_S * 0.2
    assert json.loads(await world.view.snapshot())["number"] == 2


async def test_an_error_is_everybodys_and_of_those_shortly_after() -> None:
    world = World()
    world.error = ApiError(503, "gone")
    told = await asyncio.gather(*(world.view.snapshot() for _ in range(3)), return_exceptions=True)
    assert told == [world.error] * 3 and world.asked == 1
    world.error = None
    world.now_s += KEPT_S * 0.9
    with pytest.raises(ApiError, match="gone"):
        await world.view.snapshot()
    world.now_s += KEPT_S * 0.2
    assert json.loads(await world.view.snapshot())["number"] == 2


@pytest.mark.parametrize("error", [None, ApiError(503, "gone")])
async def test_any_number_of_streams_ask_once_an_event_and_nobody_asks_when_they_are_gone(
    error: ApiError | None,
) -> None:
    world = World()
    world.error = error
    streams = [world.view.events() for _ in range(30)]
    told = await asyncio.gather(*(some(stream, 3) for stream in streams))
    seconds = world.now_s
    assert world.asked <= seconds / KEPT_S + 1, "thirty clocks run here, one for each stream"
    if error is None:
        assert all(events == sorted(events, key=lambda event: event["number"]) for events in told)
    for stream in streams:
        await stream.aclose()  # type: ignore[attr-defined]
    asked = world.asked
    await world.wait(EVERY_S)
    assert world.asked == asked


async def test_a_stream_goes_on_when_the_server_tells_nothing_and_ends_with_the_gateway() -> None:
    world = World()
    async with aclosing(world.view.events()) as events:  # type: ignore[type-var]
        world.error = ApiError(503, "gone", code="unavailable")
        (told,) = await some(events, 1)
        assert told["state"] == "unreachable" and told["error"]["code"] == "unavailable"
        world.error = None
        (told,) = await some(events, 1)
        assert told == {"number": 2}
        world.ending = True
        with pytest.raises(StopAsyncIteration):
            await anext(events)


async def test_a_snapshot_is_what_the_server_says(server: InferenceServer) -> None:
    server.script = says(response(final=True, result=[json.dumps(SNAPSHOT)]))
    async with gateway(server) as http:
        answer = await http.get("/engine")
        again = await http.get("/engine")
    assert answer.json() == again.json() == SNAPSHOT and answer.headers["cache-control"] == "no-cache"
    assert all(inputs_of(asked) == {"operation": "engine"} for asked in server.requests)


async def test_a_server_without_an_engine_is_told_as_any_error(server: InferenceServer) -> None:
    async with gateway(server) as http:
        server.script = aborts(grpc.StatusCode.UNAVAILABLE, "the engine is not ready")
        answer = await http.get("/engine")
        assert (answer.status_code, error_of(answer)["code"]) == (503, "unavailable")
    async with gateway(server) as http:
        server.script = pieces("a generation")
        assert (await http.get("/engine")).status_code == 500


async def test_the_head_of_a_stream_that_has_no_end_is_refused(server: InferenceServer) -> None:
    async with gateway(server) as http:
        answer = await http.head("/engine/stream")
    assert answer.status_code == 405 and answer.headers["allow"] == "GET" and not server.requests


@pytest.mark.parametrize("path", ["/engine", "/engine/stream"])
async def test_it_is_behind_the_keys_and_can_be_switched_off(server: InferenceServer, path: str) -> None:
    async with gateway(server, api_keys=("k",), engine_view=False) as http:
        assert (await http.get(path)).status_code == 401
        answer = await http.get(path, headers={"Authorization": "Bearer k"})
        assert answer.status_code == 404 and "--no-engine-view" in error_of(answer)["message"]
    assert not server.requests
