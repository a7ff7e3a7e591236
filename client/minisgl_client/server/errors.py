"""Why `minisgl serve` gives up although settings and model are right."""

from __future__ import annotations

from minisgl_backend.errors import StartError


class ServeError(StartError):
    """The server can not start here: a port, a library or the server itself."""

    exit_code = 1
