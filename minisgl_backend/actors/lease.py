"""Leases: who needs this engine. A lease ends with a Goodbye or with the life of the process that took it.

The kernel tells of that end through a pidfd, whatever its cause (SIGKILL included), without a heartbeat.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from minisgl_backend.actors.internal import HolderId


class Leases:
    """Owned by the front door. `on_end` is called once for each lease, in the loop."""

    def __init__(self, on_end: Callable[[HolderId], None]) -> None:
        self._on_end = on_end
        self._pidfds: dict[HolderId, int] = {}

    def __len__(self) -> int:
        return len(self._pidfds)

    def __contains__(self, holder: HolderId) -> bool:
        return holder in self._pidfds

    def take(self, holder: HolderId, pid: int) -> None:
        """A second Hello of the same holder changes nothing. A process that is gone already ends its lease at once."""
        if holder in self._pidfds:
            return
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            self._on_end(holder)
            return
        self._pidfds[holder] = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self.end, holder)

    def end(self, holder: HolderId) -> None:
        """Unknown holders are ignored."""
        pidfd = self._pidfds.pop(holder, None)
        if pidfd is None:
            return
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        self._on_end(holder)

    def close(self) -> None:
        """Forgets all leases without calling `on_end`."""
        for pidfd in self._pidfds.values():
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)
        self._pidfds.clear()
