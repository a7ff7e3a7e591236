"""The folder where the processes of one engine meet: local sockets, a lock, a log.

    $MINISGL_RUNTIME_DIR, else $XDG_RUNTIME_DIR/minisgl, else /tmp/minisgl-UID          (mode 0700)
    └── KEY/                 one engine: a hash of its settings and of this code
        ├── start.lock       held by a holder while it looks for a host or starts one
        ├── host.lock        held by the host as long as it lives, so its death frees it whatever the cause
        ├── host.pid         of that host
        ├── host.json        its settings
        ├── door             socket: holders of a lease ↔ host
        ├── engine.log       what host, scheduler and workers print
        └── gN/              one engine group (N counts restarts): its sockets and its settings

The same settings give the same key: a restarted tritonserver finds its warm engine, and another model or another
setting never meets it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import ConfigError

RUNTIME_VARIABLE = "MINISGL_RUNTIME_DIR"
_SOCKET_PATH_LIMIT = 100  # Linux takes 107 bytes; the deepest socket adds "/gNNNN/worker-NNN"


def engine_dir(config: EngineConfig) -> Path:
    """The folder of the engine with these settings; made if need be.

    Raises ConfigError when the place is not safe (owned by somebody else, open to others) or too deep for sockets.
    """
    folder = _runtime_root() / _key(config)
    if len(os.fsencode(folder)) + 18 > _SOCKET_PATH_LIMIT:
        raise ConfigError(f"the path {folder} is too long for a local socket: set {RUNTIME_VARIABLE} to a shorter one")
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _runtime_root() -> Path:
    if given := os.environ.get(RUNTIME_VARIABLE):
        root = Path(given)
    elif (given := os.environ.get("XDG_RUNTIME_DIR")) and os.access(given, os.W_OK):
        root = Path(given) / "minisgl"
    else:
        root = Path(f"/tmp/minisgl-{os.getuid()}")
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = root.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"the folder {root} must belong to this user and be closed to others (mode 0700): "
            f"mend it, or set {RUNTIME_VARIABLE} to another folder"
        )
    return root


def _key(config: EngineConfig) -> str:
    """Settings and code: an engine that runs other code than its holder would read must not be met."""
    package = Path(__file__).resolve().parent.parent
    newest = max(path.stat().st_mtime_ns for path in package.rglob("*.py"))
    parts = (msgspec.json.encode(config), os.fsencode(package), str(newest).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock file `path`, waiting for it. Blocking: for threads, not for a loop."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_locked(path: Path) -> bool:
    """Whether some process holds the lock file `path`."""
    try:
        with path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
