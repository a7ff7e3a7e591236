"""The folder where the processes of one engine meet: local sockets, a lock, a log.

    $MINISGL_RUNTIME_DIR, else $XDG_RUNTIME_DIR/minisgl, else /tmp/minisgl-UID          (mode 0700)
    └── KEY/                 one engine: a hash of its settings and of this code
        ├── start.lock       held by a holder while it looks for a host or starts one
        ├── host.lock        held by the host as long as it lives, so its death frees it whatever the cause
        ├── host.pid         of that host
        ├── host.json        its settings
        ├── door             socket: holders of a lease ↔ host
        ├── engine.log       what host, scheduler and workers print; engine.log.1: of the host before
        └── gN/              one engine group (N counts restarts): its sockets and its settings

The same settings give the same key: a restarted tritonserver finds its warm engine, and another model or another
setting never meets it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import ConfigError, StartError

RUNTIME_VARIABLE = "MINISGL_RUNTIME_DIR"

_INHERITED = ("CUDA_VISIBLE_DEVICES", "MINISGL_CACHE", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE")
_LOCK_PATIENCE_S = 120.0  # longer than any start takes under its lock
_KEPT_S = 86_400.0
_SIGN_LOOK_S = 0.02
_SOCKET_PATH_LIMIT = 100  # Linux takes 107 bytes; the deepest socket adds "/gNNNN/worker-NNN"


def engine_dir(config: EngineConfig) -> Path:
    """The folder of the engine with these settings; made if need be.

    Raises ConfigError when the place is not safe (owned by somebody else, open to others) or too deep for sockets.
    """
    folder = runtime_root() / _key(config)
    if len(os.fsencode(folder)) + 18 > _SOCKET_PATH_LIMIT:
        raise ConfigError(f"the path {folder} is too long for a local socket: set {RUNTIME_VARIABLE} to a shorter one")
    folder.mkdir(mode=0o700, exist_ok=True)
    _check_owner(folder)
    return folder


def runtime_root() -> Path:
    """The folder that only this user can enter. Raises ConfigError when it is not so."""
    if given := os.environ.get(RUNTIME_VARIABLE):
        root = Path(given).expanduser().resolve()
    elif (given := os.environ.get("XDG_RUNTIME_DIR")) and os.access(given, os.W_OK):
        root = Path(given) / "minisgl"
    else:
        root = Path(f"/tmp/minisgl-{os.getuid()}")
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(root)
    return root


def _check_owner(folder: Path) -> None:
    """A link is refused too: /tmp is everybody's, and whoever made the link could turn it elsewhere later."""
    status = folder.lstat()
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not ours or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"{folder} must be a folder that belongs to this user and is closed to others (mode 0700): "
            f"mend it, or set {RUNTIME_VARIABLE} to another folder"
        )


def _key(config: EngineConfig) -> str:
    """All that makes an engine the one its holder wants: settings, the environment it inherits, its cores, and this
    code (an engine that runs other code than its holder would read must not be met).
    """
    package = Path(__file__).resolve().parent.parent
    newest = max(path.stat().st_mtime_ns for path in package.rglob("*.py"))
    inherited = "\0".join(os.environ.get(name, "") for name in _INHERITED)
    cores = str(sorted(os.sched_getaffinity(0)))
    parts = (msgspec.json.encode(config), os.fsencode(package), f"{newest} {cores} {inherited}".encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock file `path`, waiting for it within bounds. Blocking: for threads, not for a loop.

    The folder may have been pruned while we waited; it is then made anew.

    Raises StartError when another process never lets it go.
    """
    deadline = time.monotonic() + _LOCK_PATIENCE_S
    while True:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with path.open("w") as file:
            if try_lock(file.fileno()) and _is_at(path, file.fileno()):
                yield
                return
        if time.monotonic() > deadline:
            raise StartError(f"another process holds {path}")
        time.sleep(0.02)


@contextmanager
def memory_turn(root: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Engines of one user take their memory one after another: what a device has free is true only while nobody else
    is about to take it. Holds the lock of the runtime folder itself; `waiting` is called when another engine has it.
    Blocking, for as long as the other one loads.
    """
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not try_lock(folder):
            waiting()
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


@contextmanager
def ranks_turn(home: Path, rank: int, waiting: Callable[[], None]) -> Iterator[None]:
    """`memory_turn` of all ranks of the engine group in the folder `home` of its engine: rank 0 has it for all, and the
    others take nothing before.
    """
    sign = home / "turn"
    if rank:
        while not sign.exists():
            time.sleep(_SIGN_LOOK_S)
        yield
    else:
        with memory_turn(home.parent.parent, waiting):
            sign.touch()
            yield


def prune(run_dir: Path) -> None:
    """Removes the folders of engines beside `run_dir` that are gone and said nothing for a day: each change of settings
    makes a new one. Holds their start lock meanwhile, so none is removed while somebody starts it.
    """
    for folder in run_dir.parent.iterdir():
        with contextlib.suppress(OSError):  # somebody else prunes too
            if folder == run_dir or time.time() - (folder / "engine.log").stat().st_mtime < _KEPT_S:
                continue
            with (folder / "start.lock").open("w") as file:
                if try_lock(file.fileno()) and not is_locked(folder / "host.lock"):
                    shutil.rmtree(folder, ignore_errors=True)


def try_lock(file: int) -> bool:
    """Takes the lock of an open file, if nobody holds it; the lock ends with the file."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, file: int) -> bool:
    """Whether the open file is still the one of that name."""
    try:
        return path.stat().st_ino == os.fstat(file).st_ino
    except FileNotFoundError:
        return False


def is_locked(path: Path) -> bool:
    """Whether some process holds the lock file `path`."""
    try:
        with path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two that look do not mistake one another
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
