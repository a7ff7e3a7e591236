"""Which tritonserver is run, and what it finds around it."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from minisgl_client.server.errors import ServeError
from minisgl_client.server.installation import (
    Installation,
    default_repository,
    find_installation,
    library_folder,
    server_environment,
)

STUB = f"python_backend_stubs/{sys.version_info.major}.{sys.version_info.minor}/triton_python_backend_stub"


def wheel(folder: Path, *files: str) -> Installation:
    package = folder / "pytriton" / "tritonserver"
    for name in ("bin/tritonserver", "backends/python/libtriton_python.so", *files):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_bytes(b"")
    return Installation(package / "bin" / "tritonserver", package, folder / "nvidia_pytriton.libs")


def test_a_tritonserver_on_the_path_wins(tmp_path: Path) -> None:
    binary = tmp_path / "tritonserver"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    found = find_installation({"PATH": f"{tmp_path}{os.pathsep}/usr/bin"})
    assert found == Installation(binary, None, None)
    assert found.lay_out_backends(tmp_path / "backends") is None


def test_without_one_on_the_path_the_wheels_is_taken(tmp_path: Path) -> None:
    found = find_installation({"PATH": str(tmp_path)})
    assert found.binary.parts[-4:] == ("pytriton", "tritonserver", "bin", "tritonserver")
    assert found.libraries is not None and found.libraries.is_dir()
    assert found.stub().is_file()


def test_without_any_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ServeError, match="nvidia-pytriton is not installed: pip install"):
        find_installation({"PATH": ""})


def test_the_stub_of_the_running_python_lies_beside_the_backends_library(tmp_path: Path) -> None:
    installation = wheel(tmp_path / "wheel", STUB, "backends/python/triton_python_backend_utils.py")
    backends = installation.lay_out_backends(tmp_path / "backends")
    assert backends is not None
    laid = {path.name: path.resolve() for path in (backends / "python").iterdir()}
    assert laid["triton_python_backend_stub"] == installation.stub().resolve()
    assert set(laid) == {"libtriton_python.so", "triton_python_backend_utils.py", "triton_python_backend_stub"}
    assert all(path.is_file() for path in laid.values())


def test_a_python_without_a_stub_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServeError, match="has no Python stub for Python 3"):
        wheel(tmp_path, "python_backend_stubs/2.7/triton_python_backend_stub").stub()


def test_our_python_and_its_library_come_first_in_the_environment(tmp_path: Path) -> None:
    installation = wheel(tmp_path, STUB)
    before = {"PATH": "/other/bin", "LD_LIBRARY_PATH": "/other/lib", "HOME": "/home/me"}
    after = server_environment(installation, before)
    assert after["PATH"] == f"{Path(sys.executable).parent}:/other/bin"
    own = [library_folder()] if library_folder() else []
    assert after["LD_LIBRARY_PATH"].split(":") == [*own, str(installation.libraries), "/other/lib"]
    assert after["HOME"] == "/home/me"
    assert before["PATH"] == "/other/bin"


def test_no_empty_entry_comes_into_the_search_paths(tmp_path: Path) -> None:
    after = server_environment(wheel(tmp_path, STUB), {"LD_LIBRARY_PATH": ""})
    assert "" not in after["PATH"].split(":") + after["LD_LIBRARY_PATH"].split(":")


def test_the_real_server_lacks_no_library_in_our_environment() -> None:
    found = find_installation({"PATH": "/nowhere"})
    assert found.missing_libraries(server_environment(found, os.environ)) == []


def test_a_missing_library_is_named_once(tmp_path: Path) -> None:
    ldd = tmp_path / "ldd"
    ldd.write_text("#!/bin/sh\necho '\tlibc.so.6 => /lib/libc.so.6 (0x1)'\necho '\tlibpython3.so => not found'\n" * 2)
    ldd.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert wheel(tmp_path / "wheel", STUB).missing_libraries(environment) == ["libpython3.so"]


def test_the_repository_of_this_checkout_is_found() -> None:
    assert (default_repository() / "minisgl" / "config.pbtxt").is_file()
