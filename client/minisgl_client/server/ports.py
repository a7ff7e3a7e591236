"""The addresses a server will listen on, checked before anything slow begins and kept until it listens."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from minisgl_client.server.errors import ServeError


@contextmanager
def claimed_ports(host: str, wanted: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Option name → port, each free on `host`. 0 in `wanted` is replaced by a free port.

    Inside the `with`, nobody who takes any free port is given one of them, which a server that loads for a minute
    before it listens would else find taken: a socket that is bound and does not listen is in the way of those, and not
    of the server, who asks for the port by its number. Raises ServeError, naming the option, when a port is in use,
    wanted twice, or not ours to take.
    """
    ports: dict[str, int] = {}
    with ExitStack() as held:
        with ExitStack() as probes:
            for option in sorted(wanted, key=lambda option: wanted[option] == 0):  # the fixed ones first
                holder = held.enter_context(_bound(host, option, wanted[option]))
                ports[option] = int(holder.getsockname()[1])
                probes.enter_context(_bound(host, option, ports[option], listens=True))
        yield {option: ports[option] for option in wanted}


def _bound(host: str, option: str, port: int, listens: bool = False) -> socket.socket:
    """listens: two sockets that only bind do not get in each other's way."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError):
        raise ServeError(f"--host {host!r} is no address of this machine") from None
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: TIME_WAIT is no obstacle
        bound.bind(address)
        if listens:
            bound.listen()
    except PermissionError:
        bound.close()
        raise ServeError(f"port {port} ({option}) may not be taken by this user; choose one above 1023") from None
    except OSError as error:
        bound.close()
        if port == 0 or "assign requested address" in str(error):
            raise ServeError(f"--host {host!r} is no address of this machine") from None
        raise ServeError(f"port {port} ({option}) is in use; choose another one, or 0 for any that is free") from None
    return bound
