"""Looks at the machine for `minisgl doctor`: the only part of it that reads files and asks programs.

It changes nothing, loads no model and no heavy package, and works with the base install.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from minisgl_backend.config import EngineConfig, read_settings
from minisgl_backend.device import machine
from minisgl_backend.errors import StartError
from minisgl_backend.models.files import GGUF_SUFFIX
from minisgl_backend.models.folder import read_model_spec
from minisgl_backend.models.locate import FETCHABLE, cache_folder, fetched_folder, locate_model
from minisgl_client.commands import serve
from minisgl_client.doctor.facts import Facts, Gpu, Model, Port, Triton
from minisgl_client.server.errors import ServeError
from minisgl_client.server.health import is_ready
from minisgl_client.server.installation import (
    Installation,
    default_repository,
    find_installation,
    library_folder,
    server_environment,
)
from minisgl_client.server.life import MODEL
from minisgl_client.server.ports import claimed_ports

DISTRIBUTION = "minisgl-triton"
_PORTS = {"--http-port": 8000, "--grpc-port": 8001, "--metrics-port": 8002}
_HOST = "127.0.0.1"
_EXTRAS = ("", "engine", "server")
_PATIENCE_S = 20.0  # for another program's answer
_HEADER_LIMIT = 100_000_000  # bytes of a safetensors header, the format's own limit
_ASK_LIBPYTHON = (
    "import ctypes, sys; f = ctypes.CDLL(sys.argv[1]).Py_GetVersion; f.restype = ctypes.c_char_p; print(f().decode())"
)


def gather(environment: Mapping[str, str]) -> Facts:
    """Everything. `environment` is that in which `minisgl serve` would run."""
    triton, triton_problem = look_at_triton(environment)
    model, settings_problem = _model(environment)
    gpus, complaint = look_at_gpus(environment)
    requirements = _requirements()
    library = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    return Facts(
        system=platform.platform(),
        cores=machine.usable_cores(),
        python=sys.version_info[:3],
        python_is_cpython=platform.python_implementation() == "CPython",
        executable=sys.executable,
        libpython=library,
        libpython_version=_libpython_version(library, environment),
        compiler=next((path for name in ("cc", "gcc", "clang") if (path := _which(name, environment))), ""),
        gpus=gpus,
        nvidia_smi=complaint,
        triton=triton,
        triton_problem=triton_problem,
        ports=tuple(look_at_port(option, number) for option, number in _PORTS.items()),
        free_memory=machine.free_memory_bytes(),
        total_memory=machine.total_memory_bytes(),
        free_shared_memory=_free_bytes(Path("/dev/shm")),
        cache=str(cache_folder()),
        free_disk=_free_bytes(_nearest_existing(cache_folder())),
        model=model,
        settings_problem=settings_problem,
        requirements=requirements,
        packages={name: _version(name) for names in requirements.values() for name in names},
    )


def own_version() -> str:
    """Of this package; empty in a checkout that was never installed."""
    return _version(DISTRIBUTION)


def _which(name: str, environment: Mapping[str, str]) -> str:
    return shutil.which(name, path=environment.get("PATH", "")) or ""


def _libpython_version(library: str, environment: Mapping[str, str]) -> str:
    """What the library that Triton's stub would load says of itself. Asked in a process of its own, which finds it
    as the stub would.
    """
    folders = [folder for folder in (library_folder(), environment.get("LD_LIBRARY_PATH")) if folder]
    said = _said([sys.executable, "-c", _ASK_LIBPYTHON, library], {**environment, "LD_LIBRARY_PATH": ":".join(folders)})
    return said.split()[0].rstrip("+") if said else ""


def look_at_triton(environment: Mapping[str, str]) -> tuple[Triton | None, str]:
    """The tritonserver that serve would run; else None, and why there is none."""
    try:
        found = find_installation(environment)
    except ServeError as error:
        return None, str(error)
    problem, missing, stub = "", [], Path()
    try:
        stub = found.stub() if found.package is not None else _stub_beside(found)
        missing = found.missing_libraries(server_environment(found, environment))
    except ServeError as error:
        problem = str(error)
    return Triton(str(found.binary), found.package is not None, _linked_python(stub), problem, tuple(missing)), ""


def _stub_beside(found: Installation) -> Path:
    """Of a tritonserver that knows its own backends: the layout of its container."""
    return found.binary.resolve().parent.parent / "backends" / "python" / "triton_python_backend_stub"


def _linked_python(stub: Path) -> str:
    """ "3.11" of `libpython3.11.so.1.0`, a name that stands in the file of everything that links it."""
    try:
        name = re.search(rb"libpython(\d+\.\d+)", stub.read_bytes())
    except OSError:
        return ""
    return name[1].decode() if name else ""


def look_at_gpus(environment: Mapping[str, str]) -> tuple[tuple[Gpu, ...], str]:
    """As nvidia-smi lists them, and its complaint. Neither where there is no nvidia-smi."""
    program = _which("nvidia-smi", environment)
    if not program:
        return (), ""
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, env=dict(environment), capture_output=True, text=True, timeout=_PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), type(error).__name__
    if done.returncode:
        words = (done.stdout + done.stderr).strip().splitlines()
        return (), words[0] if words else f"ended with code {done.returncode}"
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return tuple(Gpu(*row) for row in rows if len(row) == 3), ""


def look_at_port(option: str, number: int) -> Port:
    """Taken for a moment, to see whether it can be; who holds it otherwise is asked whether it is one of us."""
    try:
        with claimed_ports(_HOST, {option: number}):
            return Port(option, number, "", False)
    except ServeError as error:
        return Port(option, number, str(error), option == "--http-port" and is_ready(_HOST, number, MODEL))


def _free_bytes(folder: Path) -> int | None:
    try:
        state = os.statvfs(folder)
    except OSError:
        return None
    return state.f_bavail * state.f_frsize


def _nearest_existing(folder: Path) -> Path:
    return next((place for place in (folder, *folder.parents) if place.exists()), Path("/"))


def _model(environment: Mapping[str, str]) -> tuple[Model | None, str]:
    """The model of the settings that `minisgl serve` without options would take."""
    try:
        repository, settings = default_repository(), read_settings(None, environment)
        config = serve.engine_config(repository, settings)
        serve.bridge_config(repository, settings)
    except StartError as error:
        return None, str(error)
    return look_at_model(config), ""


def look_at_model(config: EngineConfig) -> Model:
    """Where the model's files are and whether they are whole, without asking the hub."""
    fetchable = config.model in FETCHABLE
    folder = fetched_folder(config.model) if fetchable else Path(config.model).expanduser()
    computes = config.device != "fake"
    if not folder.exists():
        return Model(config.model, "", fetchable, "", computes)
    return Model(config.model, str(folder), fetchable, _problem_of(folder), computes)


def _problem_of(folder: Path) -> str:
    """Why a model's folder can not be served, as far as the first bytes of its files say; else empty."""
    if not (folder / "config.json").is_file() and (folder.is_file() or any(folder.glob(f"*{GGUF_SUFFIX}"))):
        return _problem_of_gguf(folder)
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        return f"{folder} holds no safetensors"
    try:
        json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        return f"{folder / 'config.json'} can not be read: {getattr(error, 'strerror', None) or 'it is no JSON'}"
    return next((problem for file in weights if (problem := _problem_of_weights(file))), "")


def _problem_of_gguf(path: Path) -> str:
    try:
        read_model_spec(locate_model(str(path)))
    except StartError as error:
        return str(error)
    return ""


def _problem_of_weights(file: Path) -> str:
    """A safetensors file is a length, a JSON header with the place of each tensor, and their bytes."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(min(length, _HEADER_LIMIT)))
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        whole = file.stat().st_size == 8 + length + max(ends, default=0)
    except OSError as error:
        return f"{file} can not be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return f"{file} is damaged: its header can not be read"
    return "" if whole else f"{file} is damaged: it has not the size that its header tells"


def _requirements() -> dict[str, tuple[str, ...]]:
    """Extra → packages, as this installation was declared; empty when it is not installed."""
    try:
        declared = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    return requirements_of(declared)


def requirements_of(declared: list[str]) -> dict[str, tuple[str, ...]]:
    """`gguf>=0.17; extra == 'engine'` → {"engine": ("gguf",)}, for the extras that serving needs."""
    found: dict[str, list[str]] = {extra: [] for extra in _EXTRAS}
    for line in declared:
        name = re.match(r"[A-Za-z0-9._-]+", line)
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", line)
        key = extra[1] if extra else ""
        if name and key in found:
            found[key].append(name[0].lower().replace("_", "-"))
    return {extra: tuple(dict.fromkeys(names)) for extra, names in found.items()}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _said(command: list[str], environment: Mapping[str, str]) -> str:
    """A program's standard output; empty when it can not be run, fails or takes too long."""
    try:
        done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, timeout=_PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
