"""The proof for a GPU: what its parts may do to one another, and that what it is made of runs where there is none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from gpu.checks import Failed, Place, Report, compare
from gpu.proof import PARTS, Log, Machine, Part, run_parts

ROOT = Path(__file__).resolve().parents[3]
NO_GPU = Machine("", "3.12", "2.11", "3.6")


def part(name: str, *whats: str, box_s: float = 60.0) -> Part:
    """Of NO_GPU's patience the box is a fifth."""
    return Part(name, box_s, tuple(("tests.fakes.gpu_part", what) for what in whats))


def run(parts: list[Part], out: Path, seconds: float = 600.0) -> tuple[int, dict[str, Any], str]:
    out.mkdir()
    with (out / "run.log").open("w", encoding="utf-8") as file:
        code = run_parts(parts, out, seconds, Log(file), NO_GPU)
    return code, json.loads((out / "summary.json").read_text()), (out / "run.log").read_text()


@pytest.mark.slow
def test_a_part_that_fails_crashes_or_hangs_costs_its_own_result(tmp_path: Path) -> None:
    parts = [
        part("crashed", "crashes"),
        part("hung", "hangs", box_s=1.6),
        part("failed", "passes", "fails"),
        part("silent", "says nothing"),
        part("passed", "passes", "passes"),
    ]
    code, summary, log = run(parts, tmp_path / "out")
    outcomes = {name: entry["outcome"] for name, entry in summary["parts"].items()}
    assert code == 1 and summary["passed"] is False
    assert [name for name, entry in summary["parts"].items() if entry["passed"]] == ["passed"]
    assert "SIGSEGV" in outcomes["crashed"] and "ended after" in outcomes["hung"]
    assert outcomes["failed"] == "checks failed"
    assert summary["parts"]["failed"]["failed"] == ["a wrong number: 7 instead of 8"]
    found = json.loads((tmp_path / "out" / "hung.json").read_text())
    assert [check["name"] for check in found["checks"]] == ["of who hangs"], "what it found before stays"
    child = re.search(r"child (\d+)", log)
    assert child is not None and not alive(int(child[1]))
    assert len(json.loads((tmp_path / "out" / "passed.json").read_text())["checks"]) == 2


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_parts_that_find_no_time_left_are_told_and_not_begun(tmp_path: Path) -> None:
    code, summary, _ = run([part("first", "passes"), part("second", "passes")], tmp_path / "out", seconds=0.5)
    assert code == 1
    assert {entry["outcome"] for entry in summary["parts"].values()} == {"not begun: no time is left"}


def test_all_that_comes_back_fits_into_eight_files_and_eight_minutes() -> None:
    assert len(PARTS) + 2 <= 8
    assert sum(part.box_s for part in PARTS) <= 490, "with the start: 480 seconds bound them all together"


def test_a_check_that_fails_is_kept_with_its_reason_and_the_next_one_is_done(tmp_path: Path) -> None:
    report = Report("part", tmp_path / "part.json", 60.0, {})
    assert not report.passed, "nothing was checked"
    assert report.check("one", lambda: {"value": 1})
    assert not report.check("two", lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    assert not report.check("three", dict, needs_s=100)
    assert report.check("four", lambda: None)
    found = json.loads((tmp_path / "part.json").read_text())
    assert [check["passed"] for check in found["checks"]] == [True, False, False, True] and not found["passed"]
    assert "ZeroDivisionError" in found["checks"][1]["error"] and "not begun" in found["checks"][2]["error"]


def test_numbers_that_are_not_there_or_too_far_off_fail() -> None:
    right = torch.randn(100, generator=torch.Generator().manual_seed(0))
    compare(right + 1e-5, right, rms=1e-4, most=1e-3)
    for wrong in (right + 1e-2, right[:50], torch.full_like(right, torch.nan)):
        with pytest.raises(Failed):
            compare(wrong, right, rms=1e-4, most=1e-3)


def test_without_a_gpu_a_place_is_dry_and_has_no_bf16() -> None:
    place = Place(torch.device("cpu"))
    assert place.dry and torch.bfloat16 not in place.dtypes and place.pick(1, 2) == 2
    assert Place(torch.device("cuda")).dtypes[-1] == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ("tests.gpu.parts", "numerics", "--only", "attention", "--dtype", "float32"),
        ("load.bench.kernels_gpu", "--only", "rms_norm"),
    ],
    ids=lambda it: it[0],
)
def test_what_measures_and_checks_a_gpu_runs_dry(command: tuple[str, ...], tmp_path: Path) -> None:
    """The whole of it: `make gpu-dry`."""
    out = tmp_path / "out.json"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    whole = [sys.executable, "-m", *command, "--out", str(out), "--seconds", "300"]
    done = subprocess.run(whole, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["passed"] is True and found["checks"]


LACKING = ("pytest", "hypothesis", "psutil", "xgrammar", "gguf", "tritonclient", "minisgl_client", "openvino")
"""What a machine with a GPU may be without; README.md there promises it."""

_IMPORTS = f"""
import importlib, sys

class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {LACKING}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Lacking())
from tests.gpu.parts.__main__ import PARTS
for part in PARTS.values():
    for module in part:
        importlib.import_module("tests.gpu.parts." + module)
import load.bench.kernels_gpu, load.bench.step_gpu, tests.gpu.compilation
"""


@pytest.mark.slow
def test_all_parts_can_be_imported_without_development_packages() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTS], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
