"""The web page at `/`: a chat, and a live view of the engine. The files of web/ as they are, read once.

Where it stands in the flow: the app routes `/` and `/page/NAME` here. The page itself asks the same API as every other
client; it needs no key, what it asks for does. Nothing of it comes from elsewhere, and the policy of its content lets
nothing else in: no script in the markup, no text that becomes HTML (Trusted Types), no frame around it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PATHS = ("/", "/page/{name}")

_FOLDER = Path(__file__).with_name("web")
_INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".md": "text/plain; charset=utf-8",  # the licence of marked
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # asked again each time, and answered with 304: a new gateway has a new page
}


class Page:
    """All files, in memory. Immutable."""

    def __init__(self) -> None:
        self._files = {
            file.name: (file.read_bytes(), _TYPES[file.suffix]) for file in _FOLDER.iterdir() if file.suffix in _TYPES
        }
        self._tags = {name: f'"{hashlib.sha256(data).hexdigest()[:20]}"' for name, (data, _) in self._files.items()}

    def routes(self) -> list[Route]:
        """GET and HEAD of `PATHS`."""
        index, file = PATHS
        return [Route(index, self._index), Route(file, self._file)]

    async def _index(self, request: Request) -> Response:
        return self._answer(request, _INDEX)

    async def _file(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._files or name == _INDEX:  # its addresses are relative to /
            raise HTTPException(404)
        return self._answer(request, name)

    def _answer(self, request: Request, name: str) -> Response:
        headers = {**_HEADERS, "ETag": self._tags[name]}
        if self._tags[name] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        data, media_type = self._files[name]
        return Response(data, headers=headers, media_type=media_type)
