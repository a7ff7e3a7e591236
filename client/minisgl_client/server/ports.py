"""The addresses a server will listen on, checked before anything slow begins."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from minisgl_client.server.errors import ServeError


def claim_ports(host: str, wanted: Mapping[str, int]) -> dict[str, int]:
    """Option name → port, each free on `host` at this moment. 0 in `wanted` is replaced by a free port.

    Raises ServeError, naming the option, when a port is in use, wanted twice, or not ours to take.
    """
    held: dict[str, socket.socket] = {}
    try:
        for option in sorted(wanted, key=lambda option: wanted[option] == 0):  # the fixed ones first
            held[option] = _bind(host, option, wanted[option])
        return {option: int(held[option].getsockname()[1]) for option in wanted}
    finally:
        for holder in held.values():
            holder.close()


def _bind(host: str, option: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError):
        raise ServeError(f"--host {host!r} is no address of this machine") from None
    holder = socket.socket(family, kind, protocol)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: TIME_WAIT is no obstacle
        holder.bind(address)
        holder.listen()  # two sockets that only bind would not get in each other's way
    except PermissionError:
        holder.close()
        raise ServeError(f"port {port} ({option}) may not be taken by this user; choose one above 1023") from None
    except OSError as error:
        holder.close()
        if port == 0 or "assign requested address" in str(error):
            raise ServeError(f"--host {host!r} is no address of this machine") from None
        raise ServeError(f"port {port} ({option}) is in use; choose another one, or 0 for any that is free") from None
    return holder
