"""The most main memory this process has held at a time, while it does one thing. Linux tells it; loads no torch."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_SELF = Path("/proc/self")


class HostPeak:
    """Begins to watch when it is made. Pages of mapped files count while they are resident, as everywhere."""

    def __init__(self) -> None:
        self._resets = False
        with suppress(OSError):  # a sandbox that does not let us
            (_SELF / "clear_refs").write_text("5")  # the high-water mark falls to what is held now (proc(5))
            self._resets = True
        self._before_bytes = _status_bytes("VmRSS")

    def bytes(self) -> int | None:
        """What was taken at the peak so far beyond what was held in the beginning; None: the kernel does not tell."""
        if not self._resets:
            return None
        return max(_status_bytes("VmHWM") - self._before_bytes, 0)


def _status_bytes(field: str) -> int:
    for line in (_SELF / "status").read_text(encoding="ascii", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key == field:
            return int(value.split()[0]) * 1024
    return 0
