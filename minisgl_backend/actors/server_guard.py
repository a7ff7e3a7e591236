"""The setting `end_server_with_stub`: a tritonserver that has lost a stub of ours is killed, for whoever starts it.

A stub that dies, or is stopped, leaves its model READY and its clients waiting for ever (docs/triton.md). Under
`minisgl serve` that command looks and starts the server again. By hand nobody does, and what may be ended is not ours
to decide: so it is a setting, for servers that something starts again (a container's restart policy, systemd).
Where it stands in the flow: the door tells who took a lease, who gave it back, and whose lease ended otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from minisgl_backend.actors.internal import HolderId
from minisgl_backend.actors.stopped import state_of, until_stopped

_SERVER = "tritonserver"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Stub:
    pid: int
    own: int  # pidfd of it
    server: int  # pidfd of its tritonserver
    watching: asyncio.Task[None]


class ServerGuard:
    """Owned by the front door. Not enabled, it does nothing."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._stubs: dict[HolderId, _Stub] = {}

    def took_lease(self, holder: HolderId, pid: int) -> None:
        """A holder that is no child of a tritonserver is none of our business."""
        if not self._enabled or holder in self._stubs:
            return
        _, parent = state_of(pid)
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            server = os.pidfd_open(parent)
            opened.callback(os.close, server)
            if Path(f"/proc/{parent}/comm").read_text().strip() == _SERVER:
                own = os.pidfd_open(pid)
                opened.pop_all()
                watching = asyncio.get_running_loop().create_task(self._watch(holder, pid))
                self._stubs[holder] = _Stub(pid, own, server, watching)

    def gave_back(self, holder: HolderId) -> None:
        """It ends in order."""
        stub = self._stubs.pop(holder, None)
        if stub is not None:
            stub.watching.cancel()
            os.close(stub.own)
            os.close(stub.server)

    def lease_ended(self, holder: HolderId) -> None:
        """Kills the server when the stub is lost, and a stopped stub with it, which would not notice and keep its lease
        for ever. One that lives, and has only not read for a while, takes another lease.
        """
        stub = self._stubs.get(holder)
        if stub is not None and state_of(stub.pid)[0] in ("", "Z", "T"):
            _log.error("a stub of ours (pid %d) is lost: its tritonserver is killed ('end_server_with_stub')", stub.pid)
            for pidfd in (stub.server, stub.own):
                with contextlib.suppress(OSError):  # it is gone, too
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        self.gave_back(holder)

    def close(self) -> None:
        for holder in list(self._stubs):
            self.gave_back(holder)

    async def _watch(self, holder: HolderId, pid: int) -> None:
        await until_stopped(pid)
        self.lease_ended(holder)
