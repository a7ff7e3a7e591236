"""The judgement of `minisgl doctor`: facts → one finding each. Pure: everything is an argument.

A FAIL means that `minisgl serve` can not work here as things are, a WARN that it may not, or not well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from minisgl_client.doctor.facts import Facts

INSTALL_ALL = "pip install 'minisgl-triton[server]' (in a checkout: make)"
_GIB = 1 << 30
_MIB = 1 << 20
_PYTHONS = ((3, 11), (3, 12))
_NEED_MEMORY = (1 * _GIB, 2 * _GIB)  # fails below, warns below: the default model in fp32 with a small pool
_NEED_SHARED_MEMORY = (
    8 * _MIB,
    64 * _MIB,
)  # each stub takes one MiB, and more where large texts travel; with 2 MiB no model loads
_NEED_DISK = 1 * _GIB  # to fetch the default model: its package and the converted weights, for a moment both


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """What one check says."""

    check: str
    level: Level
    says: str
    advice: str = ""  # what to do


def judge(facts: Facts) -> tuple[Finding, ...]:
    """All checks, in the order in which a reader wants them."""
    return tuple(check(facts) for check in _CHECKS)


def can_serve(findings: tuple[Finding, ...]) -> bool:
    """Whether nothing failed."""
    return all(finding.level is not Level.FAIL for finding in findings)


def _python(facts: Facts) -> Finding:
    version = ".".join(map(str, facts.python))
    says = f"{version} on {facts.system}, {_count(facts.cores, 'usable core')}, {facts.executable}"
    if facts.python[:2] not in _PYTHONS or not facts.python_is_cpython:
        return Finding("Python", Level.FAIL, says, "install CPython 3.11 or 3.12 and build the environment with it")
    return Finding("Python", Level.OK, says)


def _libpython(facts: Facts) -> Finding:
    version = ".".join(map(str, facts.python))
    if not facts.libpython_version:
        package = f"libpython{facts.python[0]}.{facts.python[1]}"
        advice = (
            f"make system-deps, or: apt-get install {package} (a Python of your own: build it with --enable-shared)"
        )
        return Finding(
            "libpython", Level.FAIL, f"{facts.libpython} is not found; Triton's Python stub needs it", advice
        )
    if facts.libpython_version != version:
        says = f"{facts.libpython} is {facts.libpython_version}, but this Python is {version}"
        advice = "use the Python that the library belongs to: another release breaks multiprocessing in Triton's stub"
        return Finding("libpython", Level.FAIL, says, advice)
    return Finding("libpython", Level.OK, f"{facts.libpython} {facts.libpython_version}")


def _numpy(facts: Facts) -> Finding:
    version = facts.packages.get("numpy", "")
    if not version:
        return Finding("numpy", Level.FAIL, "is not installed", INSTALL_ALL)
    if facts.triton is not None and facts.triton.from_wheel and version.split(".")[0] != "1":
        says = f"{version}: the stub of nvidia-pytriton aborts on the first string input with numpy 2"
        return Finding("numpy", Level.FAIL, says, "pip install numpy==1.26.4")
    return Finding("numpy", Level.OK, version)


def _compiler(facts: Facts) -> Finding:
    if facts.compiler:
        return Finding("compiler", Level.OK, facts.compiler)
    advice = "apt-get install gcc, if a package has to be built or a kernel compiled"
    return Finding("compiler", Level.WARN, "no C compiler (cc, gcc, clang) on the PATH", advice)


def _gpu(facts: Facts) -> Finding:
    torch = facts.packages.get("torch", "")
    if facts.nvidia_smi:
        advice = "see whether the driver is loaded, and in a container whether it was started with --gpus all"
        return Finding("GPU", Level.WARN, f"nvidia-smi: {facts.nvidia_smi}; the engine would run on the CPU", advice)
    if not facts.gpus:
        return Finding("GPU", Level.OK, "none seen: the engine runs on the CPU")
    says = "; ".join(f"{gpu.name}, {gpu.memory}, driver {gpu.driver}" for gpu in facts.gpus)
    if "+cpu" in torch:
        advice = "install a CUDA build of torch (https://pytorch.org/get-started/locally)"
        return Finding("GPU", Level.WARN, f"{says}; but torch {torch} can not use it", advice)
    return Finding("GPU", Level.OK, says)


def _triton(facts: Facts) -> Finding:
    found = facts.triton
    if found is None:
        return Finding("Triton", Level.FAIL, facts.triton_problem, INSTALL_ALL)
    says = f"{found.binary} ({'package nvidia-pytriton' if found.from_wheel else 'from the PATH'})"
    if found.problem:
        return Finding("Triton", Level.FAIL, f"{says}: {found.problem}", INSTALL_ALL)
    if found.missing_libraries:
        missing = ", ".join(found.missing_libraries)
        return Finding("Triton", Level.FAIL, f"{says}: shared libraries are missing: {missing}", "make system-deps")
    return Finding("Triton", Level.OK, says)


def _stub(facts: Facts) -> Finding:
    version = f"{facts.python[0]}.{facts.python[1]}"
    if facts.triton is None:
        return Finding("Python stub", Level.WARN, "not looked at without a tritonserver")
    if not facts.triton.stub_python:
        advice = "install Triton's Python backend beside this tritonserver"
        return Finding("Python stub", Level.WARN, "the Python backend of this tritonserver was not found", advice)
    if facts.triton.stub_python != version:
        says = f"is built for Python {facts.triton.stub_python}, and this is Python {version}"
        return Finding("Python stub", Level.FAIL, says, f"install this package for Python {facts.triton.stub_python}")
    return Finding("Python stub", Level.OK, f"for Python {version}")


def _ports(facts: Facts) -> Finding:
    taken = [port for port in facts.ports if port.problem]
    numbers = ", ".join(str(port.number) for port in facts.ports)
    if not taken:
        return Finding("ports", Level.OK, f"{numbers} are free")
    if any(port.serves_us for port in facts.ports):
        return Finding("ports", Level.WARN, f"a server with our model listens on {numbers}; a second needs others")
    options = " ".join(f"{port.option} 0" for port in taken)
    return Finding("ports", Level.FAIL, "; ".join(port.problem for port in taken), f"minisgl serve {options}")


def _memory(facts: Facts) -> Finding:
    says = f"{_size(facts.free_memory)} free of {_size(facts.total_memory)}"
    return _room("memory", says, facts.free_memory, _NEED_MEMORY, "end other programs or give the container more")


def _shared_memory(facts: Facts) -> Finding:
    if facts.free_shared_memory is None:
        return Finding("/dev/shm", Level.FAIL, "is not there", "mount a tmpfs there: Triton's Python backend needs it")
    says = f"{_size(facts.free_shared_memory)} free"
    advice = "start the container with --shm-size=1g"
    return _room("/dev/shm", says, facts.free_shared_memory, _NEED_SHARED_MEMORY, advice)


def _disk(facts: Facts) -> Finding:
    if facts.free_disk is None:
        says = f"the model cache {facts.cache} can not be looked at"
        return Finding("disk", Level.WARN, says, "set MINISGL_CACHE to a folder of yours")
    says = f"{_size(facts.free_disk)} free at {facts.cache}"
    if facts.free_disk >= _NEED_DISK:
        return Finding("disk", Level.OK, says)
    to_fetch = facts.model is not None and facts.model.computes and facts.model.fetchable and not facts.model.folder
    level = Level.FAIL if to_fetch else Level.WARN
    return Finding(
        "disk", level, says, f"{_size(_NEED_DISK)} are needed to fetch a model; MINISGL_CACHE moves the cache"
    )


def _model(facts: Facts) -> Finding:
    found = facts.model
    if found is None:
        return Finding("model", Level.FAIL, facts.settings_problem, "see docs/configuration.md")
    if not found.computes:
        return Finding("model", Level.OK, 'none is read: the setting device is "fake"')
    if found.problem:
        advice = f"minisgl fetch {found.name}, after the folder is removed" if found.fetchable else "see README.md"
        return Finding("model", Level.FAIL, found.problem, advice)
    if found.folder:
        return Finding("model", Level.OK, f"{found.name}: {found.folder}")
    if found.fetchable:
        says = f"{found.name} is not fetched yet; serve will do it"
        return Finding("model", Level.WARN, says, f"minisgl fetch {found.name}")
    says = f"{found.name} is no folder here; serve will ask the Hugging Face hub"
    return Finding("model", Level.WARN, says)


def _packages(facts: Facts) -> Finding:
    if not facts.requirements:
        return Finding("packages", Level.FAIL, "minisgl-triton is not installed in this Python", INSTALL_ALL)
    needed = [name for extra in _needed_extras(facts) for name in facts.requirements.get(extra, ())]
    missing = [name for name in dict.fromkeys(needed) if not facts.packages.get(name)]
    installed = ", ".join(f"{name} {version}" for name, version in sorted(facts.packages.items()) if version)
    if missing:
        return Finding("packages", Level.FAIL, f"missing: {', '.join(missing)}; installed: {installed}", INSTALL_ALL)
    return Finding("packages", Level.OK, installed)


_CHECKS: tuple[Callable[[Facts], Finding], ...] = (
    _python,
    _libpython,
    _numpy,
    _compiler,
    _gpu,
    _triton,
    _stub,
    _ports,
    _memory,
    _shared_memory,
    _disk,
    _model,
    _packages,
)


def _needed_extras(facts: Facts) -> tuple[str, ...]:
    """The extra `server` brings a tritonserver; where one is on the PATH the engine is enough."""
    return ("", "engine") if facts.triton is not None and not facts.triton.from_wheel else ("", "engine", "server")


def _room(check: str, says: str, there: int, needs: tuple[int, int], advice: str) -> Finding:
    least, good = needs
    if there < least:
        return Finding(check, Level.FAIL, f"{says}; at least {_size(least)} are needed", advice)
    if there < good:
        return Finding(check, Level.WARN, f"{says}; {_size(good)} are better", advice)
    return Finding(check, Level.OK, says)


def _size(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / _MIB:.0f} MiB"


def _count(number: int, of: str) -> str:
    return f"{number} {of}" if number == 1 else f"{number} {of}s"
