"""Finds the living host of an engine, or starts one. Blocking: called from a thread.

The host is no part of its starter: it has a session of its own and outlives a killed Triton stub by its lease. The
start lock makes holders that come together agree on one host.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from minisgl_backend.actors.rundir import engine_dir, is_locked, locked, prune
from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import StartError
from minisgl_backend.models.locate import FETCHABLE

_START_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a host lives."""

    run_dir: Path
    pid: int


def absolute(config: EngineConfig) -> EngineConfig:
    """The same settings, meaning the same model and files from any working directory."""
    if config.step_trace:
        config = msgspec.structs.replace(config, step_trace=str(Path(config.step_trace).expanduser().resolve()))
    path = Path(config.model).expanduser()
    if config.model in FETCHABLE:  # as locate_model: a folder of that name in the way is not meant
        return config
    return msgspec.structs.replace(config, model=str(path.resolve())) if path.exists() else config


def find_or_start(config: EngineConfig, environment: Mapping[str, str] | None = None) -> Place:
    """The living host of this engine. Raises StartError when a new one can not be started.

    environment: variables of a new host, instead of this process's own. Those that make an engine another one
    (rundir.engine_dir) must be the same in both.
    """
    run_dir = engine_dir(config)
    with locked(run_dir / "start.lock"):
        place = find(run_dir)
        if place is None:
            prune(run_dir)
            place = _start(config, run_dir, environment)
        return place


def find(run_dir: Path) -> Place | None:
    """The living host of the engine of this folder (rundir.engine_dir), if there is one."""
    if not is_locked(run_dir / "host.lock"):
        return None
    try:
        return Place(run_dir, int((run_dir / "host.pid").read_text()))
    except (OSError, ValueError):  # it is ending: its pid is gone before its lock
        return None


def _start(config: EngineConfig, run_dir: Path, environment: Mapping[str, str] | None) -> Place:
    """The host forks away from the process we start, so it is nobody's child, and says its pid through a pipe."""
    (run_dir / "host.json").write_bytes(msgspec.json.encode(config))
    log_file = run_dir / "engine.log"
    if log_file.exists():
        log_file.replace(run_dir / "engine.log.1")
    told, tells = os.pipe()
    try:
        with log_file.open("wb") as log:
            command = [_python(), "-P", "-m", "minisgl_backend.actors.host", str(run_dir), str(tells)]
            command.append(str(time.monotonic()))
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=environment,
                start_new_session=True,
                pass_fds=(tells,),
            )
        os.close(tells)
        tells = -1
        process.wait()
        heard, _, _ = select.select([told], [], [], _START_PATIENCE_S)
        word = os.read(told, 32) if heard else b""
    finally:
        os.close(told)
        if tells >= 0:
            os.close(tells)
    if not word:
        problem = "ended at its start" if heard else f"did not come up within {_START_PATIENCE_S:g} s"
        raise StartError(f"the engine host {problem}; its log: {log_file}")
    return Place(run_dir, int(word))


def _python() -> str:
    """The environment's interpreter. In Triton's stub, sys.executable is not it."""
    if Path(sys.executable or "").name.startswith("python"):
        return sys.executable
    inside = Path(sys.prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    if os.access(inside, os.X_OK):
        return str(inside)
    found = shutil.which("python3")
    if found is None:
        raise StartError("no python3 on the PATH to run the engine with")
    return found
