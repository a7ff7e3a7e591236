"""What `minisgl doctor` says of a machine: one fact changed at a time on a machine where all is well."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from minisgl_client.doctor.checks import Finding, Level, can_serve, judge
from minisgl_client.doctor.facts import Facts, Gpu, Model, Port, Triton

TRITON = Triton("/venv/pytriton/bin/tritonserver", True, "3.11", "", ())
PORTS = (
    Port("--http-port", 8000, "", False),
    Port("--grpc-port", 8001, "", False),
    Port("--metrics-port", 8002, "", False),
)
MODEL = Model("smollm2", "/cache/smollm2", True, "")
PACKAGES = {"msgspec": "0.19", "numpy": "1.26.4", "torch": "2.11.0+cpu", "nvidia-pytriton": "0.7.0"}
WELL = Facts(
    system="Linux-6.1-x86_64-with-glibc2.36",
    cores=2,
    python=(3, 11, 7),
    python_is_cpython=True,
    executable="/venv/bin/python",
    libpython="libpython3.11.so.1.0",
    libpython_version="3.11.7",
    compiler="/usr/bin/cc",
    gpus=(),
    nvidia_smi="",
    triton=TRITON,
    triton_problem="",
    ports=PORTS,
    free_memory=8 << 30,
    total_memory=16 << 30,
    free_shared_memory=1 << 30,
    cache="/home/ada/.cache/minisgl",
    free_disk=50 << 30,
    model=MODEL,
    settings_problem="",
    requirements={"": ("msgspec", "numpy"), "engine": ("torch",), "server": ("numpy", "nvidia-pytriton")},
    packages=PACKAGES,
)


def finding(check: str, **changed: Any) -> Finding:
    """What that check says when these facts are different."""
    (found,) = (found for found in judge(replace(WELL, **changed)) if found.check == check)
    return found


def taken(option: str, number: int, *, serves_us: bool = False) -> Port:
    return Port(option, number, f"port {number} ({option}) is in use", serves_us)


def test_a_machine_where_all_is_well_has_nothing_to_advise() -> None:
    findings = judge(WELL)
    assert [(found.check, found.level, found.advice) for found in findings] == [
        (found.check, Level.OK, "") for found in findings
    ]
    assert len(findings) == 13 and can_serve(findings)


OUT_OF_ORDER: list[tuple[str, dict[str, Any], str, str]] = [
    ("Python", {"python": (3, 13, 0)}, "3.13.0", "3.11 or 3.12"),
    ("Python", {"python": (3, 10, 4)}, "3.10.4", "3.11 or 3.12"),
    ("Python", {"python_is_cpython": False}, "3.11.7", "CPython"),
    ("libpython", {"libpython_version": ""}, "is not found", "apt-get install libpython3.11"),
    ("libpython", {"libpython_version": "3.11.2"}, "is 3.11.2, but this Python is 3.11.7", "the Python that"),
    ("numpy", {"packages": {**PACKAGES, "numpy": "2.1.0"}}, "aborts", "numpy==1.26.4"),
    ("numpy", {"packages": {**PACKAGES, "numpy": ""}}, "is not installed", "pip install"),
    ("Triton", {"triton": None, "triton_problem": "there is no tritonserver"}, "there is no", "pip install"),
    ("Triton", {"triton": replace(TRITON, problem="has no Python stub")}, "has no Python stub", "pip install"),
    ("Triton", {"triton": replace(TRITON, missing_libraries=("libz.so.1",))}, "libz.so.1", "make system-deps"),
    ("Python stub", {"triton": replace(TRITON, stub_python="3.10")}, "built for Python 3.10", "for Python 3.10"),
    ("ports", {"ports": (taken("--http-port", 8000), *PORTS[1:])}, "8000", "minisgl serve --http-port 0"),
    ("memory", {"free_memory": 900 << 20}, "900 MiB free of 16.0 GiB; at least 1.0 GiB", "end other programs"),
    ("/dev/shm", {"free_shared_memory": 2 << 20}, "2 MiB free; at least 8 MiB", "--shm-size"),
    ("/dev/shm", {"free_shared_memory": None}, "is not there", "tmpfs"),
    ("disk", {"free_disk": 9 << 20, "model": replace(MODEL, folder="")}, "9 MiB free at", "MINISGL_CACHE"),
    (
        "model",
        {"model": replace(MODEL, problem="/x/model.safetensors is damaged")},
        "is damaged",
        "minisgl fetch smollm2",
    ),
    ("model", {"model": None, "settings_problem": "unknown setting 'page_siz'"}, "page_siz", "configuration.md"),
    ("packages", {"packages": {**PACKAGES, "torch": ""}}, "missing: torch; installed: msgspec", "pip install"),
    ("packages", {"requirements": {}, "packages": {}}, "is not installed in this Python", "pip install"),
]


@pytest.mark.parametrize(("check", "changed", "says", "advice"), OUT_OF_ORDER)
def test_what_keeps_serve_from_working_fails_and_says_what_to_do(
    check: str, changed: dict[str, Any], says: str, advice: str
) -> None:
    found = finding(check, **changed)
    assert found.level is Level.FAIL and says in found.says and advice in found.advice
    assert not can_serve(judge(replace(WELL, **changed)))


NOT_SO_WELL: list[tuple[str, dict[str, Any], str]] = [
    ("compiler", {"compiler": ""}, "no C compiler"),
    ("GPU", {"nvidia_smi": "NVIDIA-SMI has failed"}, "NVIDIA-SMI has failed; the engine would run on the CPU"),
    ("GPU", {"gpus": (Gpu("H200", "143771 MiB", "570.1"),)}, "torch 2.11.0+cpu can not use it"),
    ("Python stub", {"triton": replace(TRITON, stub_python="")}, "was not found"),
    ("ports", {"ports": (taken("--http-port", 8000, serves_us=True), *PORTS[1:])}, "a server with our model"),
    ("memory", {"free_memory": 3 << 29}, "2.0 GiB are better"),
    ("/dev/shm", {"free_shared_memory": 32 << 20}, "64 MiB are better"),
    ("disk", {"free_disk": 9 << 20}, "9 MiB free"),
    ("disk", {"free_disk": None}, "can not be looked at"),
    ("model", {"model": replace(MODEL, folder="")}, "serve will do it"),
    ("model", {"model": Model("org/name", "", False, "")}, "serve will ask the Hugging Face hub"),
]


@pytest.mark.parametrize(("check", "changed", "says"), NOT_SO_WELL)
def test_what_serve_can_live_with_is_a_warning(check: str, changed: dict[str, Any], says: str) -> None:
    found = finding(check, **changed)
    assert found.level is Level.WARN and says in found.says
    assert can_serve(judge(replace(WELL, **changed)))


def test_a_gpu_that_torch_can_use_is_named_with_its_driver() -> None:
    packages = {**PACKAGES, "torch": "2.11.0+cu130"}
    found = finding("GPU", gpus=(Gpu("H200", "143771 MiB", "570.1"),), packages=packages)
    assert (found.level, found.says) == (Level.OK, "H200, 143771 MiB, driver 570.1")


def test_in_a_container_that_has_a_tritonserver_the_package_is_not_missed_and_numpy_2_is_fine() -> None:
    packages = {**PACKAGES, "nvidia-pytriton": "", "numpy": "2.1.0"}
    changed = {"triton": replace(TRITON, from_wheel=False), "packages": packages}
    assert finding("packages", **changed).level is Level.OK
    assert finding("numpy", **changed).level is Level.OK


def test_on_the_fake_device_no_model_is_missed() -> None:
    fake = Model("smollm2", "", True, "", computes=False)
    assert finding("model", model=fake).level is Level.OK
    assert finding("disk", model=fake, free_disk=0).level is Level.WARN


def test_with_the_base_install_only_all_that_is_missing_is_named_once() -> None:
    changed = {
        "packages": {"msgspec": "0.19", "numpy": "2.1.0", "torch": "", "nvidia-pytriton": ""},
        "triton": None,
        "triton_problem": "there is no tritonserver on the PATH",
    }
    assert finding("packages", **changed).says.startswith("missing: torch, nvidia-pytriton; installed: ")
    assert finding("Triton", **changed).level is Level.FAIL
    assert finding("Python stub", **changed).level is Level.WARN
