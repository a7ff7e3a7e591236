"""The C++ sources of this folder → one shared object for a processor's instructions, kept in the cache folder.

`python -m minisgl_backend.kernels.native.build CACHE` builds the best level of this machine: a step of the set-up.
The name of a library is a hash of all that went into it, so a new compiler, torch or source makes a new one; objects
are kept in the same way. torch is not imported: its folder is looked up.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from minisgl_backend.kernels.native.levels import Level, best_level, why_no_level

SOURCES = Path(__file__).with_name("src")

_KEPT_DAYS = 14  # since a library or object was last used

_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-ffp-contract=fast",  # never -ffast-math: what is not finite must stay so
    "-fvisibility=hidden",
    "-fno-gnu-unique",  # libraries of two levels in one process share nothing
    "-Wall",
    "-Werror=return-type",
)


class CompilerMissing(Exception):
    """There is no C++ compiler, or it does not know the level."""


class BuildFailed(Exception):
    """The compiler's own words."""


def build(level: Level, cache: Path, progress: Callable[[str], None] = lambda line: None) -> Path:
    """The library of a level, built unless it is there. Two processes do not build at once.

    cache: the folder of all that is kept; made if it is not there. progress: a line before a build and one after, or
    one where it waits for who builds.
    Raises CompilerMissing, BuildFailed, OSError: the folder can not be written.
    """
    return build_sources(SOURCES, level, cache, progress)


def build_sources(sources: Path, level: Level, cache: Path, progress: Callable[[str], None]) -> Path:
    """`build` of a folder of *.cpp and *.h. Where that can not be, what another compiler has made of them will do."""
    folder = cache / "native"
    stem = f"{level.name}-{_digest(level, *sorted(sources.iterdir()))}"
    try:
        return _build(sources, level, folder, stem, progress)
    except (CompilerMissing, OSError):
        for built in folder.glob(f"{stem}-*.so"):
            return built
        raise


def _build(sources: Path, level: Level, folder: Path, stem: str, progress: Callable[[str], None]) -> Path:
    compiler = _find_compiler()
    target = folder / f"{stem}-{compiler.version}.so"
    if _in_use(target):
        return target
    compiler.check(level)
    (folder / "objects").mkdir(parents=True, exist_ok=True)
    with _one_builder(folder, progress):
        if not _in_use(target):
            progress(f"compiling kernels for {level.name}, once")
            start = time.monotonic()
            _link(compiler, _compile_all(compiler, level, sources, folder / "objects"), target)
            _prune(folder)
            progress(f"compiled kernels in {time.monotonic() - start:.0f} s")
    return target


@dataclass(frozen=True, slots=True)
class _Compiler:
    path: str
    version: str

    def check(self, level: Level) -> None:
        """Raises CompilerMissing."""
        command = [self.path, *level.flags, "-E", "-x", "c++", os.devnull]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            raise CompilerMissing(f"{self.path} {self.version} does not know the instructions of {level.name}")


def _find_compiler() -> _Compiler:
    """$CXX, else g++."""
    name = os.environ.get("CXX") or "g++"
    found = shutil.which(name)
    if found is None:
        raise CompilerMissing(f"no {name} here")
    version = subprocess.run([found, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True, check=False)
    return _Compiler(found, version.stdout.strip())


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations, "torch is a dependency of the engine"
    return Path(spec.submodule_search_locations[0])


def _with_headers(source: Path) -> list[Path]:
    """A source and all of ours that it includes, so that an edit compiles again what it reaches and no more."""
    found = {source.name: source}
    waiting = [source]
    while waiting:
        for name in re.findall(r'^#include "(.+)"$', waiting.pop().read_text(), re.MULTILINE):
            if name not in found:
                found[name] = source.with_name(name)
                waiting.append(found[name])
    return [found[name] for name in sorted(found)]


def _flags(level: Level) -> list[str]:
    return [*_FLAGS, *level.flags, f"-DMINISGL_NAMESPACE={level.namespace}"]


def _digest(level: Level, *files: Path) -> str:
    """Of all that goes into a build beside the compiler."""
    state = hashlib.sha256("\0".join([importlib.metadata.version("torch"), *_flags(level)]).encode())
    for file in files:
        state.update(b"\0" + file.name.encode() + b"\0" + file.read_bytes())
    return state.hexdigest()[:20]


def _compile_all(compiler: _Compiler, level: Level, sources: Path, objects: Path) -> list[Path]:
    """As many at a time as there are cores."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        files = sorted(sources.glob("*.cpp"), key=lambda file: not file.stem.endswith("_ops"))  # the longest first
        return list(pool.map(lambda source: _compile(compiler, level, source, objects), files))


def _compile(compiler: _Compiler, level: Level, source: Path, objects: Path) -> Path:
    target = objects / f"{source.stem}-{_digest(level, *_with_headers(source))}-{compiler.version}.o"
    if not _in_use(target):
        include = _torch_folder() / "include"
        folders = [f"-isystem{include}", f"-isystem{include / 'torch/csrc/api/include'}"]
        _run([compiler.path, *_flags(level), *folders, "-c", str(source)], target)
    return target


def _link(compiler: _Compiler, objects: list[Path], target: Path) -> None:
    """Against torch's own libraries, and through them its OpenMP: `-fopenmp` here would bring a second one."""
    library = _torch_folder() / "lib"
    torch = [f"-L{library}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{library}", f"-Wl,-rpath-link,{library}"]
    _run([compiler.path, "-shared", "-Wl,-Bsymbolic", *map(str, objects), *torch], target)


def _run(command: list[str], target: Path) -> None:
    """The compiler, whose output appears under its name when it is whole."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.stem}")
    os.close(handle)
    made = Path(name)
    try:
        done = subprocess.run([*command, "-o", name], capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildFailed(done.stderr.strip() or f"{command[0]} ended with {done.returncode}")
        made.chmod(0o755)  # whoever shares the folder may use it
        with made.open("rb") as whole:
            os.fsync(whole.fileno())  # a crash would leave a name without what it names, and nobody would build again
        made.replace(target)
    finally:
        made.unlink(missing_ok=True)


def _in_use(file: Path) -> bool:
    """Whether it is there; then it counts as used now."""
    try:
        os.utime(file)
    except OSError:
        return file.exists()  # in a folder that belongs to somebody else
    return True


@contextmanager
def _one_builder(folder: Path, progress: Callable[[str], None]) -> Iterator[None]:
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process, which compiles kernels")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _prune(folder: Path) -> None:
    """Removes what nobody has used for a while. A process that has mapped a library keeps it."""
    oldest = time.time() - _KEPT_DAYS * 86400
    for file in (*folder.iterdir(), *(folder / "objects").iterdir()):
        if file.is_file() and file.stat().st_mtime < oldest:
            file.unlink(missing_ok=True)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def main() -> int:
    """Builds for this machine. What goes wrong is told and is no error: the engine then runs on torch alone."""
    level = best_level()
    if level is None:
        _say(f"{why_no_level()}: the engine runs on torch alone, several times slower")
        return 0
    try:
        build(level, Path(sys.argv[1]), _say)
    except (CompilerMissing, BuildFailed, OSError) as error:
        _say(f"{error}: no kernels of our own; the engine runs on torch alone, several times slower")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
