"""Where requests go: one Triton server. Of several, `Backends.choose` is the place to choose.

app ─► Backends.choose ─► Backend.pieces ─► AsyncClient ─► Triton (gRPC)
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import msgspec

from minisgl_client.aio import AsyncClient
from minisgl_client.errors import ClientError, RequestRefused, Unavailable, Unsupported
from minisgl_client.gateway.errors import of_client_error
from minisgl_client.gateway.mapping import Plan
from minisgl_client.pieces import Piece

_NO_PARSER = "parse_output: this model has no parser"  # the server's words
_LEARNED_S = 60.0  # how long it is remembered: another model may be loaded under the name
_PROBE_TIMEOUT_S = 5.0
_ASK_TIMEOUT_S = 30.0
_PROBE: dict[str, Any] = {"text": "", "max_tokens": 0}  # which a living engine refuses, and does nothing for


class Backend:
    """One Triton server."""

    def __init__(
        self, client: AsyncClient, timeout_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """timeout_s: for each whole answer."""
        self._client = client
        self._timeout_s = timeout_s
        self._clock = clock
        self._parses_from = 0.0  # until then chats are not asked to be parsed

    async def pieces(self, plan: Plan, request_id: str) -> AsyncGenerator[tuple[int, Piece], None]:
        """Of all prompts, each with its prompt's number, as they come. Raises ApiError; close it to cancel them."""
        if len(plan.prompts) == 1:
            try:
                async with contextlib.aclosing(self._answer(plan, plan.prompts[0], request_id)) as answer:
                    async for piece in answer:
                        yield 0, piece
            except ClientError as error:
                raise of_client_error(error, plan.names) from None
            return
        arrived: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue(len(plan.prompts))
        tasks = [
            asyncio.create_task(self._feed(arrived, place, self._answer(plan, prompt, f"{request_id}-{place}")))
            for place, prompt in enumerate(plan.prompts)
        ]
        try:
            open_ = len(tasks)
            while open_:
                place, news = await arrived.get()
                if isinstance(news, ClientError):
                    raise of_client_error(news, plan.names_of(place)) from None
                if isinstance(news, Exception):
                    raise news
                if news is None:
                    open_ -= 1
                else:
                    yield place, news
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def ask(self, operation: str, names: Mapping[str, str], text: str | None = None, **fields: Any) -> Any:
        """What is no generation. names: the engine's field → the client's. Raises ApiError."""
        try:
            return await self._client.ask(operation, text, timeout_s=_ASK_TIMEOUT_S, **_written(fields))
        except ClientError as error:
            raise of_client_error(error, names) from None

    async def check(self) -> None:
        """Raises ClientError when no engine is behind the server: Triton's own readiness does not say so."""
        try:
            await self._client.generate(**_PROBE, timeout_s=_PROBE_TIMEOUT_S)
        except RequestRefused as error:
            if error.status == "NOT_FOUND":
                raise Unavailable(str(error)) from None
        except Unavailable as error:
            if "the queue is full" not in str(error):  # busy is not ill
                raise

    async def _feed(
        self,
        arrived: asyncio.Queue[tuple[int, Piece | Exception | None]],
        place: int,
        answer: AsyncGenerator[Piece, None],
    ) -> None:
        try:
            async with contextlib.aclosing(answer):
                async for piece in answer:
                    await arrived.put((place, piece))
            await arrived.put((place, None))
        except Exception as error:  # whoever waits for the pieces raises it
            await arrived.put((place, error))

    async def _answer(self, plan: Plan, fields: Mapping[str, Any], request_id: str) -> AsyncGenerator[Piece, None]:
        """Of one prompt. A chat is parsed where the model has a parser, which the server alone knows."""
        if plan.parses and self._clock() >= self._parses_from:
            try:
                async with contextlib.aclosing(self._ask(plan, {**fields, "parse_output": True}, request_id)) as pieces:
                    async for piece in pieces:
                        yield piece
                return
            except Unsupported as error:
                if not str(error).startswith(_NO_PARSER):
                    raise
                self._parses_from = self._clock() + _LEARNED_S
        if plan.tools:
            raise Unsupported("tools: how this model calls them is not known; name one in tool_choice, or require one")
        async with contextlib.aclosing(self._ask(plan, fields, request_id)) as pieces:
            async for piece in pieces:
                yield piece

    async def _ask(self, plan: Plan, fields: Mapping[str, Any], request_id: str) -> AsyncGenerator[Piece, None]:
        given = {**_written(fields), "request_id": request_id, "timeout_s": self._timeout_s}
        async with self._client.stream(stream=plan.stream and not plan.unanswered, **given) as stream:
            async for piece in stream:
                yield piece


def _written(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The messages as JSON, which the client writes ten times slower; it refuses by name what lies too deep."""
    with contextlib.suppress(RecursionError):
        if "messages" in fields:
            return {**fields, "messages": msgspec.Raw(msgspec.json.encode(fields["messages"]))}
    return fields


class Backends:
    """All of them."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def choose(self, plan: Plan | None = None) -> Backend:
        """For a plan; None: for a question about health."""
        return self._backend
