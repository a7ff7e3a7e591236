"""Which tritonserver to run, and the surroundings in which its Python backend finds this environment.

Used by `minisgl serve`. A tritonserver on the PATH (a container) is taken as it is; else the one inside the package
`nvidia-pytriton`, for which a backend folder is laid out: Triton wants the stub of the running Python beside the
backend's library, and the package keeps one stub per Python version elsewhere.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from minisgl_client.server.errors import ServeError

_BACKEND_FILES = ("libtriton_python.so", "triton_python_backend_utils.py")


@dataclass(frozen=True)
class Installation:
    """A tritonserver that can be run."""

    binary: Path
    package: Path | None  # the wheel's `tritonserver` folder; None for a server that knows its own backends
    libraries: Path | None  # the wheel's bundled libraries

    def lay_out_backends(self, folder: Path) -> Path | None:
        """Makes `folder`/python with links into the wheel; returns the folder to pass as --backend-directory."""
        if self.package is None:
            return None
        python = folder / "python"
        python.mkdir(parents=True)
        for name in _BACKEND_FILES:
            (python / name).symlink_to(self.package / "backends" / "python" / name)
        (python / "triton_python_backend_stub").symlink_to(self.stub())
        return folder

    def stub(self) -> Path:
        """The wheel's stub for the running Python. Raises ServeError when there is none."""
        assert self.package is not None
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        stub = self.package / "python_backend_stubs" / version / "triton_python_backend_stub"
        if not stub.is_file():
            raise ServeError(f"the tritonserver of nvidia-pytriton has no Python stub for Python {version}")
        return stub

    def missing_libraries(self, environment: Mapping[str, str]) -> list[str]:
        """Shared libraries that the loader does not find, as ldd says; empty when ldd is not there to ask."""
        files = [self.binary]
        if self.package is not None:
            files += [self.package / "backends" / "python" / _BACKEND_FILES[0], self.stub()]
        ldd = shutil.which("ldd", path=environment.get("PATH"))
        if ldd is None:
            return []
        listing = subprocess.run([ldd, *map(str, files)], env=dict(environment), capture_output=True, text=True)
        missing = (line.split()[0] for line in listing.stdout.splitlines() if line.endswith("=> not found"))
        return list(dict.fromkeys(missing))


def find_installation(environment: Mapping[str, str]) -> Installation:
    """The tritonserver on the PATH, else the one of the package nvidia-pytriton. Raises ServeError without one."""
    if found := shutil.which("tritonserver", path=environment.get("PATH", "")):
        return Installation(Path(found), None, None)
    spec = importlib.util.find_spec("pytriton")
    for place in (spec.submodule_search_locations or []) if spec else []:
        package = Path(place) / "tritonserver"
        if (package / "bin" / "tritonserver").is_file():
            return Installation(package / "bin" / "tritonserver", package, Path(place).parent / "nvidia_pytriton.libs")
    raise ServeError(
        "there is no tritonserver on the PATH and the package nvidia-pytriton is not installed: "
        "pip install 'minisgl-triton[server]'"
    )


def server_environment(installation: Installation, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of the server's process: `environment`, with our Python first in PATH and LD_LIBRARY_PATH.

    The stub takes its packages from the first `python3` of the PATH, and links libpython: with another patch release
    of it than the environment's, `multiprocessing` fails in the stub.
    """
    result = dict(environment)
    result["PATH"] = _joined(str(Path(sys.executable).parent), environment.get("PATH"))
    libraries = [library_folder()] if library_folder() else []
    if installation.libraries is not None:
        libraries.append(str(installation.libraries))
    result["LD_LIBRARY_PATH"] = _joined(*libraries, environment.get("LD_LIBRARY_PATH"))
    return result


def library_folder() -> str | None:
    """The folder of this Python's own shared library, or None when it lies in the system's."""
    folder, name = sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME")
    return str(folder) if folder and name and (Path(folder) / name).is_file() else None


def default_repository() -> Path:
    """The model repository of this installation: inside the package, or beside it in a checkout."""
    spec = importlib.util.find_spec("minisgl_backend")
    assert spec is not None and spec.submodule_search_locations
    package = Path(spec.submodule_search_locations[0])
    for place in (package / "model_repository", package.parent / "model_repository"):
        if place.is_dir():
            return place
    raise ServeError("this installation has no model_repository: name one with --model-repository")


def _joined(*entries: str | None) -> str:
    return os.pathsep.join(entry for entry in entries if entry)
