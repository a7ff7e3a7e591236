"""Which names a gateway without keys answers to. A page of another site can make its own name lead to 127.0.0.1 (DNS
rebinding); its browser then takes the gateway for that site and lets the page ask. The name stands in the header Host.

Where it stands in the flow: in front of the routes (app.py). The command decides whether it is needed.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send


class KnownHosts:
    """Lets those in who ask by an address, by localhost or by one of the names; a program may also name nothing."""

    def __init__(self, app: ASGIApp, names: Sequence[str], refusal: Response) -> None:
        """refusal: what the others get."""
        self._app = app
        self._names = frozenset(name.lower() for name in names)
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        known = all(self._knows(_name_of(host)) for host in hosts)
        await (self._app if known else self._refusal)(scope, receive, send)

    def _knows(self, name: str) -> bool:
        return name in ("", "localhost") or name.endswith(".localhost") or name in self._names or _is_address(name)


def _is_address(name: str) -> bool:
    """True: no name, so nobody else's."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name_of(host: str) -> str:
    """Without the port."""
    host = host.strip().lower()
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].removesuffix(".")
