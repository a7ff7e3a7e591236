"""What `minisgl doctor` sees of a machine, and the command itself."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.config import EngineConfig
from minisgl_client.doctor import probe

PROGRAM = (
    "import sys\n"
    "for name in {blocked}: sys.modules[name] = None\n"
    "from minisgl_client.cli import main\n"
    "code = main(['doctor', '--json'])\n"
    "print([name for name in {heavy} if sys.modules.get(name)], file=sys.stderr)\n"
    "sys.exit(code)\n"
)
ENGINE = ["torch", "transformers", "tokenizers", "safetensors", "gguf", "zmq", "jinja2", "huggingface_hub", "pytriton"]


def program(folder: Path, name: str, script: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


def doctor(blocked: list[str], **variables: str) -> tuple[int, dict[str, Any], str]:
    """Runs the real command: its exit code, its JSON, its stderr."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(blocked=blocked, heavy=ENGINE)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.slow
def test_the_real_command_looks_at_this_machine_and_loads_nothing_heavy() -> None:
    code, told, errors = doctor([], MINISGL_SECRET="hunter2", HF_TOKEN="hf_hunter2")
    levels = {found["check"]: found["level"] for found in told["findings"]}
    assert code == (0 if told["can_serve"] else 1)
    assert {levels[check] for check in ("Python", "libpython", "numpy", "Triton", "Python stub", "packages")} == {"ok"}
    assert errors.strip() == "[]"
    assert "hunter2" not in json.dumps(told) and str(Path.home()) + "/" not in json.dumps(told)


@pytest.mark.slow
def test_the_command_works_without_the_engine() -> None:
    code, told, errors = doctor(ENGINE)
    assert code in (0, 1) and len(told["findings"]) == 13, errors


@pytest.mark.slow
def test_a_setting_that_is_refused_is_the_models_failure() -> None:
    code, told, _ = doctor([], MINISGL_SETTINGS='{"page_siz": 8}')
    (found,) = (found for found in told["findings"] if found["check"] == "model")
    assert code == 1 and found["level"] == "fail" and "did you mean 'page_size'" in found["says"]


def test_the_declared_requirements_are_sorted_by_extra() -> None:
    declared = [
        "msgspec>=0.19",
        "tritonclient[grpc]>=2.51",
        "huggingface_hub>=1; extra == 'engine'",
        "ruff; extra == 'dev'",
    ]
    assert probe.requirements_of(declared) == {
        "": ("msgspec", "tritonclient"),
        "engine": ("huggingface-hub",),
        "server": (),
    }


def test_a_port_that_somebody_holds_is_told_and_is_not_ours() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = probe.look_at_port("--http-port", holder.getsockname()[1])
    assert "is in use" in port.problem and not port.serves_us


@pytest.mark.parametrize(
    ("script", "gpus", "complaint"),
    [
        ("echo 'NVIDIA H200, 143771 MiB, 570.1'; echo 'NVIDIA L4, 23034 MiB, 570.1'", 2, ""),
        ("echo 'NVIDIA-SMI has failed: no driver' ; exit 9", 0, "NVIDIA-SMI has failed: no driver"),
        ("exit 6", 0, "ended with code 6"),
    ],
)
def test_nvidia_smi_is_asked_and_its_complaint_is_kept(tmp_path: Path, script: str, gpus: int, complaint: str) -> None:
    program(tmp_path, "nvidia-smi", script)
    found, said = probe.look_at_gpus({"PATH": str(tmp_path) + os.pathsep + "/bin"})
    assert (len(found), said) == (gpus, complaint)


def test_without_nvidia_smi_there_is_no_gpu_and_no_complaint(tmp_path: Path) -> None:
    assert probe.look_at_gpus({"PATH": str(tmp_path)}) == ((), "")


def test_the_python_that_a_containers_stub_links_is_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin", "tritonserver", "true")
    stub = tmp_path / "backends" / "python" / "triton_python_backend_stub"
    stub.parent.mkdir(parents=True)
    stub.write_bytes(b"\x7fELF\x00libc.so.6\x00libpython3.12.so.1.0\x00")
    found, problem = probe.look_at_triton({"PATH": str(tmp_path / "bin")})
    assert found is not None and problem == ""
    assert (found.from_wheel, found.stub_python) == (False, "3.12")
    stub.unlink()
    found, _ = probe.look_at_triton({"PATH": str(tmp_path / "bin")})
    assert found is not None and found.stub_python == ""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A model's folder with one tensor of four bytes."""
    header = json.dumps({"__metadata__": {}, "x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    yield tmp_path


def test_a_whole_model_folder_has_no_problem(folder: Path) -> None:
    model = probe.look_at_model(EngineConfig(model=str(folder)))
    assert (model.folder, model.problem, model.fetchable, model.computes) == (str(folder), "", False, True)


@pytest.mark.parametrize("kept", [0, 5, 40, -1])
def test_a_damaged_tensor_file_is_named(folder: Path, kept: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    assert f"{weights} is damaged" in probe.look_at_model(EngineConfig(model=str(folder))).problem


def test_a_folder_without_weights_or_with_a_broken_configuration_is_told(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    assert "config.json can not be read: it is no JSON" in probe.look_at_model(EngineConfig(model=str(folder))).problem
    (folder / "config.json").unlink()
    assert "No such file" in probe.look_at_model(EngineConfig(model=str(folder))).problem
    (folder / "model.safetensors").unlink()
    assert "holds no safetensors" in probe.look_at_model(EngineConfig(model=str(folder))).problem


def test_a_model_that_is_not_here_is_in_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path))
    fetched = probe.look_at_model(EngineConfig())
    assert (fetched.folder, fetched.fetchable, fetched.problem) == ("", True, "")
    hub = probe.look_at_model(EngineConfig(model="org/name"))
    assert (hub.folder, hub.fetchable, hub.problem) == ("", False, "")
