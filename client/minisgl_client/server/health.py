"""Whether a server answers that it is ready, over plain HTTP."""

from __future__ import annotations

import http.client

_TIMEOUT_S = 2.0


def is_ready(host: str, port: int, model: str) -> bool:
    """True when the server and the model are; False also when nobody answers."""
    return all(status_of(host, port, path) == 200 for path in ("/v2/health/ready", f"/v2/models/{model}/ready"))


def says_not_ready(host: str, port: int, model: str) -> bool:
    """True when the server answers that the model is not. False also when nobody answers."""
    return status_of(host, port, f"/v2/models/{model}/ready") not in (200, None)


def reachable_host(host: str) -> str:
    """The address to connect to for a server that listens on `host`: "any address" is no address to connect to."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def status_of(host: str, port: int, path: str) -> int | None:
    """Of a GET; None when nobody answers."""
    connection = http.client.HTTPConnection(reachable_host(host), port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
