"""The gateway's HTTP: routes, who may ask, how large a body may be, the shape of every error, one log line a request.

Door (id, log line, size) ─► CORS ─► routes ─► read_body ─► plan ─► Answering
                                       │ keys
                                       └ ApiError ─► OpenAI's error object
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl_client.errors import ClientError
from minisgl_client.gateway.answering import Answering, Facts
from minisgl_client.gateway.backends import Backends
from minisgl_client.gateway.chats import ChatTeller
from minisgl_client.gateway.completions import CompletionTeller
from minisgl_client.gateway.engine_view import EngineView
from minisgl_client.gateway.errors import ApiError, of_client_error, unknown_model
from minisgl_client.gateway.fields import AnyBody, ChatBody, CompletionBody, read_body
from minisgl_client.gateway.hosts import KnownHosts
from minisgl_client.gateway.mapping import Plan, ids_to_echo, plan_chat, plan_completion
from minisgl_client.gateway.metrics import CONTENT_TYPE, read_metrics
from minisgl_client.gateway.page import Page
from minisgl_client.gateway.replies import Reply, Teller
from minisgl_client.gateway.settings import GatewaySettings
from minisgl_client.gateway.shared import Shared
from minisgl_client.gateway.tokens import NAMES, DetokenizeBody, TokenizeBody, ask_detokenize, ask_tokenize

log = logging.getLogger("minisgl.gateway")

_GUARDED = ("/v1/", "/metrics", "/engine", "/tokenize", "/detokenize")
_FACTS = "minisgl.facts"
_LARGE = "minisgl.large"  # of a request: its body holds more than
_LARGE_BYTES = 256 << 10
_FRESH = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # for a proxy that would keep or collect it
Struct = TypeVar("Struct", bound=AnyBody)
P = ParamSpec("P")
Result = TypeVar("Result")


def build_app(settings: GatewaySettings, backends: Backends, is_ending: Callable[[], bool] = lambda: False) -> ASGIApp:
    """The ASGI application. The back ends' connections stay the caller's, who closes them.

    is_ending: the process is to stop: streams that would go on for ever end.
    """
    api = _Api(settings, backends, is_ending)
    app = Starlette(
        routes=[
            Route("/health", api.health),
            Route("/metrics", api.metrics),
            Route("/engine", api.engine),
            Route("/engine/stream", api.engine_stream),
            *(Route(f"{prefix}/tokenize", api.tokenize, methods=["POST"]) for prefix in ("", "/v1")),
            *(Route(f"{prefix}/detokenize", api.detokenize, methods=["POST"]) for prefix in ("", "/v1")),
            Route("/v1/models", api.models),
            Route("/v1/models/{name:path}", api.one_model),
            Route("/v1/completions", api.completions, methods=["POST"]),
            Route("/v1/chat/completions", api.chat, methods=["POST"]),
            *Page().routes(),
        ],
        exception_handlers={ApiError: _told, HTTPException: _not_routed, Exception: _fault},
    )
    guarded: ASGIApp = _Keys(app, settings.api_keys)
    if settings.hosts is not None:
        guarded = KnownHosts(guarded, settings.hosts, _of_error(_OTHER_HOST))
    if settings.origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=list(settings.origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After", "X-Request-Id"],
        )
    return _Door(guarded)


_OTHER_HOST = ApiError(
    403,
    "the header Host names none of this gateway's hosts: add it with --allowed-host, or start the gateway with keys",
    code="unknown_host",
)


class _Api:
    """The endpoints."""

    def __init__(self, settings: GatewaySettings, backends: Backends, is_ending: Callable[[], bool]) -> None:
        self._settings = settings
        self._backends = backends
        self._view = EngineView(lambda: backends.choose().ask("engine", {}), is_ending)
        self._health = Shared(self._check)
        self._created = int(time.time())

    async def health(self, request: Request) -> Response:
        """200 when an engine answers behind the server, which is asked once for all who want to know: it needs no
        key.
        """
        await self._health.answer()
        return _json({"status": "ok"})

    async def _check(self) -> None:
        try:
            await self._backends.choose().check()
        except ClientError as error:
            raise of_client_error(error, {}) from None

    async def metrics(self, request: Request) -> Response:
        """Triton's, of Prometheus."""
        if not self._settings.metrics_url:
            raise ApiError(404, "this gateway was started without --metrics-url", code="unknown_url")
        try:
            return Response(await read_metrics(self._settings.metrics_url), media_type=CONTENT_TYPE)
        except ClientError as error:
            raise of_client_error(error, {}) from None

    async def engine(self, request: Request) -> Response:
        """What the engine does at this moment."""
        self._check_view()
        return Response(await self._view.snapshot(), media_type="application/json", headers=_FRESH)

    async def engine_stream(self, request: Request) -> Response:
        """The same again and again, as server-sent events. HEAD would have no end either, and nothing to show."""
        if request.method == "HEAD":
            raise HTTPException(405, headers={"Allow": "GET"})
        self._check_view()
        return StreamingResponse(self._view.events(), media_type="text/event-stream", headers=_FRESH)

    def _check_view(self) -> None:
        if not self._settings.engine_view:
            raise ApiError(404, "this gateway was started with --no-engine-view", code="unknown_url")

    async def models(self, request: Request) -> Response:
        """The one there is."""
        return _json({"object": "list", "data": [self._model()]})

    async def one_model(self, request: Request) -> Response:
        """By its name."""
        self._check_model(request.path_params["name"])
        return _json(self._model())

    async def completions(self, request: Request) -> Answering:
        """POST /v1/completions."""
        body = await self._read(request, CompletionBody)
        texts = [await self._text_of(ids) for ids in await _beside(request, ids_to_echo, body)]
        plan = await _beside(request, plan_completion, body, texts)
        return self._answering(request, plan, CompletionTeller(plan), "cmpl")

    async def chat(self, request: Request) -> Answering:
        """POST /v1/chat/completions."""
        body = await self._read(request, ChatBody)
        plan = await _beside(request, plan_chat, body)
        return self._answering(request, plan, ChatTeller(plan), "chatcmpl")

    async def _text_of(self, ids: list[int]) -> str:
        """Special tokens and all: what an echo shows of a prompt of ids."""
        fields: dict[str, Any] = {"input_ids": ids, "skip_special_tokens": False}
        told = await self._backends.choose().ask("detokenize", {"input_ids": "prompt"}, **fields)
        return str(told["prompt"])

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        body = await self._read(request, TokenizeBody)
        return await self._operation(request, "tokenize", await _beside(request, ask_tokenize, body))

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        body = await self._read(request, DetokenizeBody)
        return await self._operation(request, "detokenize", ask_detokenize(body))

    async def _operation(self, request: Request, operation: str, fields: dict[str, Any]) -> Response:
        id = f"{operation}-{request.scope[_FACTS]['id']}"
        return _json(await self._backends.choose().ask(operation, NAMES, request_id=id, **fields))

    def _answering(self, request: Request, plan: Plan, teller: Teller, prefix: str) -> Answering:
        facts: Facts = request.scope[_FACTS]
        facts["stream"] = plan.stream
        id = f"{prefix}-{facts['id']}"
        reply = Reply(plan, teller, id=id, model=self._settings.name, created=int(time.time()))
        return Answering(plan, reply, self._backends.choose(plan), id, facts)

    async def _read(self, request: Request, kind: type[Struct]) -> Struct:
        """JSON only: a page of another origin may send anything else without asking first."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "the Content-Type must be application/json", code="unsupported_media_type")
        raw = await self._bounded(request)
        request.scope[_LARGE] = len(raw) > _LARGE_BYTES
        body = await _beside(request, read_body, raw, kind)
        if body.model is not None:
            self._check_model(body.model)
        return body

    async def _bounded(self, request: Request) -> bytes:
        """The body. Raises ApiError, and closes the connection of one that is too slow."""
        try:
            async with asyncio.timeout(self._settings.body_s):
                return await _read_bytes(request, self._settings.max_body_bytes)
        except TimeoutError:
            message = f"the body must come within {self._settings.body_s:g} s"
            raise ApiError(408, message, code="too_slow", headers={"Connection": "close"}) from None

    def _check_model(self, name: str) -> None:
        if name != self._settings.name:
            raise unknown_model(name)

    def _model(self) -> dict[str, Any]:
        return {"id": self._settings.name, "object": "model", "created": self._created, "owned_by": "minisgl"}


class _Keys:
    """Lets those in who know a key. The health is everybody's."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._keys and scope["type"] == "http" and scope["path"].startswith(_GUARDED) and not self._knows(scope):
            error = ApiError(
                401,
                "Incorrect API key provided: give one as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await _of_error(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        """All keys are compared, each in constant time."""
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        known = [hmac.compare_digest(key.strip(), one) for one in self._keys]
        return scheme.lower() == b"bearer" and any(known)


class _Door:
    """Gives each request an id and, when it is over, its line in the log, which holds nothing that a client wrote."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        id = uuid.uuid4().hex
        facts: Facts = {"id": id, "status": 0}
        began_s = time.monotonic()

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                facts["status"] = facts["status"] or message["status"]
                facts["first_ms"] = round((time.monotonic() - began_s) * 1e3, 1)
                message = {**message, "headers": [*message["headers"], (b"x-request-id", id.encode())]}
            await send(message)

        try:
            await self._app({**scope, _FACTS: facts}, receive, told)
        finally:
            facts["total_ms"] = round((time.monotonic() - began_s) * 1e3, 1)
            _log_line(scope, facts)


def _log_line(scope: Scope, facts: Facts) -> None:
    """A path that is none of ours is somebody's text."""
    path = scope["path"] if scope["path"] in _OURS else "-"
    if path in ("/health", "/metrics", "/engine") and facts["status"] == 200:
        return  # somebody asks every few seconds
    if scope["path"].startswith("/page/") and facts["status"] in (200, 304):
        return  # a dozen belong to one look at /
    level = logging.ERROR if facts["status"] == 500 else logging.INFO
    told = " ".join(f"{name}={value}" for name, value in facts.items() if name != "status")
    log.log(level, "%s %s %s %s", scope["method"][:10], path, facts["status"], told)


_OURS = frozenset(
    (
        *("/", "/health", "/metrics", "/engine", "/engine/stream"),
        *("/v1/models", "/v1/completions", "/v1/chat/completions"),
        *("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"),
    )
)


async def _beside(request: Request, work: Callable[P, Result], *arguments: P.args, **named: P.kwargs) -> Result:
    """What is done with a large body is done in a thread, and others are served meanwhile."""
    if request.scope[_LARGE]:
        return await asyncio.to_thread(work, *arguments, **named)
    return work(*arguments, **named)


async def _read_bytes(request: Request, limit_bytes: int) -> bytes:
    """The body. Raises ApiError (413) without reading more of it than is allowed."""
    too_large = ApiError(413, f"the body must hold at most {limit_bytes} bytes", code="body_too_large")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit_bytes:
        raise too_large
    parts, read_bytes = [], 0
    try:
        async for part in request.stream():
            read_bytes += len(part)
            if read_bytes > limit_bytes:
                raise too_large
            parts.append(part)
    except ClientDisconnect:
        raise ApiError(400, "the body did not come whole", code="invalid_json") from None
    return b"".join(parts)


async def _told(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request.scope[_FACTS]["error"] = error.code or error.kind
    return _of_error(error)


async def _not_routed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        known = (
            "/v1/chat/completions, /v1/completions, /v1/models, /tokenize, /detokenize, /engine, /engine/stream, "
            "/health and /metrics"
        )
        return _of_error(ApiError(404, f"there is no such URL here; known are {known}", code="unknown_url"))
    if error.status_code == 405:
        message = f"the method {request.method[:10]} is not allowed here"
        return _of_error(ApiError(405, message, code="method_not_allowed", headers=error.headers))
    return _of_error(ApiError(error.status_code, error.detail, headers=error.headers))


async def _fault(request: Request, error: Exception) -> Response:
    """Our own bug: its traceback is in the log."""
    return _of_error(ApiError(500, "the gateway failed at this request", kind="server_error", code="gateway_fault"))


def _of_error(error: ApiError) -> Response:
    return _json(error.body(), error.status, error.headers)


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")
