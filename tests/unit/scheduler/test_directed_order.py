"""Order is data: the same calls give the same plans in every process (docs/upstream-faults.md 8)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import minisgl_backend

TESTS = Path(__file__).resolve().parents[2]
PACKAGE_HOME = Path(minisgl_backend.__path__[0]).parent


@pytest.mark.slow
def test_processes_with_different_hash_seeds_make_the_same_plans_to_the_byte() -> None:
    def start(seed: str) -> subprocess.Popen[str]:
        environment = dict(os.environ, PYTHONHASHSEED=seed, PYTHONPATH=os.pathsep.join((str(PACKAGE_HOME), str(TESTS))))
        command = [sys.executable, "-P", str(TESTS / "fakes" / "plan_bytes.py")]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    processes = [start(seed) for seed in ("0", "1", "4242", "random")]
    printed = [process.communicate(timeout=120)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert printed[0].strip() and len(set(printed)) == 1, printed
