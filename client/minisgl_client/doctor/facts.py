"""What `minisgl doctor` knows of a machine, as plain values: filled by `probe`, judged by `checks`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One line of nvidia-smi."""

    name: str
    memory: str  # with its unit, as nvidia-smi writes it
    driver: str


@dataclass(frozen=True)
class Port:
    """One of the ports of `minisgl serve`."""

    option: str
    number: int
    problem: str  # why it can not be taken; empty: it is free
    serves_us: bool  # a server with our model answers there


@dataclass(frozen=True)
class Triton:
    """The tritonserver that `minisgl serve` would run."""

    binary: str
    from_wheel: bool  # of the package nvidia-pytriton; else on the PATH
    stub_python: str  # "3.11": what its Python backend's stub links; empty: no stub was found
    problem: str  # what keeps it from running here; empty: nothing seen
    missing_libraries: tuple[str, ...]


@dataclass(frozen=True)
class Model:
    """The model that `minisgl serve` would load."""

    name: str
    folder: str  # empty: it is in no folder yet
    fetchable: bool  # `minisgl fetch` and `minisgl serve` can get it
    problem: str  # why its files can not be served; empty: nothing seen
    computes: bool = True  # False: device "fake", which reads no model


@dataclass(frozen=True)
class Facts:
    """All of it. Sizes in bytes; None or empty where the machine did not say."""

    system: str  # platform.platform()
    cores: int
    python: tuple[int, int, int]
    python_is_cpython: bool
    executable: str
    libpython: str  # file name of the shared library that the stub needs
    libpython_version: str  # what the library the stub would load says of itself, "3.11.7"; empty: not found
    compiler: str  # path
    gpus: tuple[Gpu, ...]
    nvidia_smi: str  # its complaint, when there is one; empty when it ran or is not there
    triton: Triton | None
    triton_problem: str  # why there is none
    ports: tuple[Port, ...]
    free_memory: int
    total_memory: int
    free_shared_memory: int | None  # /dev/shm
    cache: str  # folder of fetched models
    free_disk: int | None  # below it
    model: Model | None
    settings_problem: str  # why the model is not known: a setting that is refused
    requirements: Mapping[str, tuple[str, ...]]  # extra ("" for the base) → names of its packages
    packages: Mapping[str, str]  # name → installed version, of all in `requirements`; "" when it is not installed
