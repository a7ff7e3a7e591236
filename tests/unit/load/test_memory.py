"""`load.bench.memory`: whose pages are counted, and as whose."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from load.bench.memory import Held, Memory, held_by, lines, measure, parse_arguments, role
from load.bench.peer_cases import Case
from load.bench.peer_process import Runner, start

FAKE = Path(__file__).parents[2] / "fakes" / "fake_peer.py"
PATIENCE_S = 60.0


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["/usr/bin/python3", "-m", "minisgl_backend.actors.host", "/run/x"], "minisgl_backend.actors.host"),
        (["/opt/triton_python_backend_stub", "/models/ensemble/1/model.py", "prefix"], "stub of ensemble"),
        (["/opt/tritonserver", "--model-repository=/models"], "tritonserver"),
        (["/venv/bin/python", "/venv/bin/minisgl", "serve"], "minisgl"),
    ],
)
def test_a_process_is_named_by_what_it_runs(command: list[str], name: str) -> None:
    assert role(command) == name


def test_what_a_process_takes_itself_is_private_to_it() -> None:
    before = held_by(os.getpid(), "me")
    taken = bytearray(os.urandom(1 << 20) * 64)
    after = held_by(os.getpid(), "me")
    assert after.private - before.private > len(taken) // 2 and after.files > 0 and after.total > after.private


def test_a_process_that_is_gone_is_told_from_one_that_holds_nothing() -> None:
    with pytest.raises(OSError):
        held_by(1 << 22, "nobody")


def test_an_engine_is_looked_at_before_while_and_after_it_works(tmp_path: Path) -> None:
    with start(Runner("fake:bf16", (sys.executable, str(FAKE), "good")), tmp_path, PATIENCE_S) as engine:
        memory = measure("fake:bf16", engine, Case(0, 8, 4, 2), range(100, 120))
        pid = engine.pid
    assert memory.started and memory.most and memory.after and pid
    assert all(one.total > 0 for part in (memory.started, memory.most, memory.after) for one in part)


def test_a_line_for_people_has_the_sums_and_each_process() -> None:
    mib = 1 << 20
    worker, host = Held("worker", 5 * mib, 3 * mib, 2 * mib), Held("host", mib, 0, 0)
    text = list(lines(Memory("llm:bf16", (host,), (worker, host), (worker,))))
    assert text[0] == "llm:bf16: 1 MiB when it had started, 11 MiB at most, 10 MiB afterwards"
    assert " ".join(text[1].split()) == "10 MiB: 5 private, 3 files, 2 shared worker" and len(text) == 3


def test_peers_are_measured_without_ours_too() -> None:
    arguments = parse_arguments(["--engines", "openvino"])
    assert arguments.engines == ["openvino:bf16"] and arguments.case == Case(0, 128, 128, 32)
