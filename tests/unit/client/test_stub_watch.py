"""Which lost process makes `minisgl serve` start its server again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from minisgl_backend.actors.stopped import LOOKS
from minisgl_client.server.stubs import StubWatch, children_of

Stub = Callable[[str, str], "subprocess.Popen[bytes]"]


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Stub]:
    """Starts a child of ours that looks like the stub of a model with so much in its model.py."""
    started: list[subprocess.Popen[bytes]] = []
    program = tmp_path / "triton_python_backend_stub"
    program.symlink_to(sys.executable)

    def start(model: str, code: str) -> subprocess.Popen[bytes]:
        file = tmp_path / model / "1" / "model.py"
        file.parent.mkdir(parents=True)
        file.write_text(f"{code}\nprint(flush=True)\ninput()\n")
        process = subprocess.Popen([program, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def _all_ready(model: str) -> bool:
    return False


OURS, NEIGHBOUR = "# import minisgl_backend", "pass"


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Returns when the kernel has done it; a dead one stays a zombie."""
    os.kill(process.pid, number)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


def _looks(watch: StubWatch, count: int) -> list[str]:
    return [lost for _ in range(count) if (lost := watch.look()) is not None]


@pytest.mark.parametrize(
    ("number", "how"),
    [(signal.SIGKILL, "died"), (signal.SIGSTOP, "was stopped by a signal")],
    ids=["killed", "stopped"],
)
def test_a_stub_of_ours_that_is_lost_is_told_after_a_second(stub: Stub, number: signal.Signals, how: str) -> None:
    process, watch = stub("mine", OURS), StubWatch(os.getpid(), _all_ready)
    assert not _looks(watch, 2 * LOOKS)
    _signal(process, number)
    assert not _looks(watch, LOOKS - 1)
    assert _looks(watch, 1) == [f"the stub of model 'mine' (pid {process.pid}) {how} 1 s ago"]


def test_a_stub_that_is_stopped_for_a_moment_is_not_lost(stub: Stub) -> None:
    process, watch = stub("mine", OURS), StubWatch(os.getpid(), _all_ready)
    for _ in range(3):
        _signal(process, signal.SIGSTOP)
        assert not _looks(watch, LOOKS - 1)
        process.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, process.pid, os.WCONTINUED)
        assert not _looks(watch, 1)


def test_a_stub_that_ends_with_its_model_is_not_lost(stub: Stub) -> None:
    process, watch = stub("mine", OURS), StubWatch(os.getpid(), _all_ready)
    assert not _looks(watch, LOOKS)
    _signal(process, signal.SIGKILL)
    assert not _looks(watch, LOOKS - 1)
    process.wait()  # as Triton does when it unloads a model
    assert process.pid not in children_of(os.getpid())
    assert not _looks(watch, 3 * LOOKS)


def test_neighbours_and_other_children_are_left_to_themselves(stub: Stub) -> None:
    theirs, watch = stub("theirs", NEIGHBOUR), StubWatch(os.getpid(), _all_ready)
    assert not _looks(watch, LOOKS)
    _signal(theirs, signal.SIGKILL)
    assert not _looks(watch, 3 * LOOKS)


def test_a_stub_that_dies_right_after_the_server_was_ready_is_told(stub: Stub) -> None:
    process, watch = stub("mine", OURS), StubWatch(os.getpid(), _all_ready)
    _signal(process, signal.SIGKILL)
    assert len(_looks(watch, LOOKS)) == 1


def test_a_model_that_is_loaded_later_is_watched_too(stub: Stub) -> None:
    watch = StubWatch(os.getpid(), _all_ready)
    process = stub("later", OURS)
    assert not _looks(watch, LOOKS)
    _signal(process, signal.SIGKILL)
    assert len(_looks(watch, LOOKS)) == 1


def test_a_server_that_is_stopped_is_told(stub: Stub) -> None:
    server = stub("server", NEIGHBOUR)
    watch = StubWatch(server.pid, _all_ready)
    _signal(server, signal.SIGSTOP)
    assert _looks(watch, LOOKS) == ["tritonserver was stopped by a signal 1 s ago"]


def test_a_stub_that_is_met_before_it_is_one_is_watched_too(tmp_path: Path) -> None:
    """Between fork and exec it looks like its server."""
    stub, model = tmp_path / "triton_python_backend_stub", tmp_path / "mine" / "1" / "model.py"
    stub.symlink_to(sys.executable)
    model.parent.mkdir(parents=True)
    model.write_text(f"{OURS}\nprint(flush=True)\ninput()\n")
    becomes = f"import os; input(); os.execv({str(stub)!r}, [{str(stub)!r}, {str(model)!r}])"
    process = subprocess.Popen([sys.executable, "-c", becomes], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdin is not None and process.stdout is not None
        watch = StubWatch(os.getpid(), _all_ready)
        assert process.pid in children_of(os.getpid())
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        assert not _looks(watch, LOOKS)
        _signal(process, signal.SIGKILL)
        assert len(_looks(watch, LOOKS)) == 1
    finally:
        process.kill()
        process.communicate()


def test_a_stub_that_dies_while_its_model_loads_is_tritons_to_tell(stub: Stub) -> None:
    """The other models of the server, and their clients, go on."""
    loading = {"mine"}
    process, watch = stub("mine", OURS), StubWatch(os.getpid(), loading.__contains__)
    assert not _looks(watch, LOOKS)
    _signal(process, signal.SIGKILL)
    assert not _looks(watch, 3 * LOOKS)
    loading.clear()
    assert len(_looks(watch, 1)) == 1
