"""A copy of the package with one line of it reverted, and a run of the tests that must notice.

Where it stands in the flow: `rules.py` names what to revert; `__main__.py` and `test_mutations.py` run it. The
checkout is never touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "minisgl_backend"

PASSED, FAILED, HANGS = 0, 1, -1  # pytest's own codes, and ours for a run that was ended
_MARK = "MUTATION_RUN"  # in the environment of whatever a run starts

# Tests must see the copy and nothing else: -P keeps the working folder out of the path, and the import is checked.
_RUN = """
import sys, pathlib, pytest, minisgl_backend
found = pathlib.Path(minisgl_backend.__path__[0]).resolve()
assert found.parent == pathlib.Path(sys.argv[1]).resolve(), f"the tests would import {found}"
sys.exit(pytest.main(sys.argv[2:]))
"""


@dataclass(frozen=True)
class Mutation:
    """One rule, reverted: in `file` (below the package) the text `old`, which stands there once, becomes `new`."""

    rule: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]  # ids of pytest, from the root; each must fail
    name: str


class SourceMoved(Exception):
    """The text that a mutation replaces is not there exactly once: the mutation must be written anew."""


def mutated(mutation: Mutation, source: str) -> str:
    """`source` with the rule reverted."""
    count = source.count(mutation.old)
    if count != 1:
        raise SourceMoved(f"{mutation.name}: its text stands {count} times in {PACKAGE}/{mutation.file}, expected 1")
    assert mutation.new != mutation.old, f"{mutation.name} changes nothing"
    text = source.replace(mutation.old, mutation.new)
    compile(text, mutation.file, "exec")
    return text


def write_copy(target: Path, mutation: Mutation | None, source: Path = ROOT) -> Path:
    """The package of `source` below `target`, with `mutation`; returns the folder to put into PYTHONPATH."""
    shutil.copytree(source / PACKAGE, target / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    if mutation is not None:
        _mutate(mutation, target)
    return target


def write_checkout(target: Path, mutation: Mutation) -> Path:
    """As write_copy, of all that is in the checkout: a server's Python stub finds the package in its working folder."""
    shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns("__pycache__", ".*", "build", "dist"))
    _mutate(mutation, target)
    return target


def _mutate(mutation: Mutation, copy: Path) -> None:
    path = copy / PACKAGE / mutation.file
    path.write_text(mutated(mutation, path.read_text()))


def seeing(copy: Path, arguments: Sequence[str], root: Path = ROOT) -> tuple[list[str], dict[str, str]]:
    """A run of pytest that imports the package from `copy`, as do the processes it starts, and all else from `root`:
    command and environment.
    """
    own = ["-p", "no:cacheprovider", "--rootdir", str(root)]
    command = [sys.executable, "-P", "-c", _RUN, str(copy), *own, *arguments]
    return command, dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, (copy, root / "client", root))))


def run_tests(copy: Path, tests: tuple[str, ...], timeout_s: float = 600) -> tuple[int, str]:
    """Runs `tests` against the copy: pytest's exit code (0 passed, 1 failed; HANGS: no end) and what it printed.

    Whatever they started has ended when this returns: a reverted rule may leave an engine that nobody ends.
    """
    mark = uuid.uuid4().hex
    command, environment = seeing(copy, ("-q", "-x", "--no-header", *tests))
    environment |= {_MARK: mark, "HYPOTHESIS_PROFILE": "mutation"}
    with tempfile.TemporaryFile() as printed:  # a pipe would be held open by whoever outlives the tests
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=printed, stderr=subprocess.STDOUT)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = HANGS
        finally:
            _end_all(mark)
            process.wait()
        printed.seek(0)
        text = printed.read().decode(errors="replace")
    return code, f"{text}\nno end within {timeout_s:.0f} s" if code == HANGS else text


def _end_all(mark: str) -> None:
    """Kills every process with this mark in its environment: also one of a session of its own, whose parent is gone."""
    killed = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == mark:
                process.kill()
                killed.append(process)
        except psutil.Error:  # ended meanwhile, or somebody else's
            pass
    psutil.wait_procs(killed, timeout=10)


class Unhealthy(Exception):
    """A test does not pass without any mutation, so its failure with one tells nothing."""


class Whole:
    """A copy without any mutation, and how long each test takes there, which tells when a mutated one hangs."""

    def __init__(self, copy: Path) -> None:
        self.copy = copy
        self._limits_s: dict[str, float] = {}

    def try_all(self, tests: Sequence[str]) -> None:
        """Runs `tests`, all at once: pytest takes longer to start than most of them. Raises Unhealthy."""
        began = time.monotonic()
        code, printed = run_tests(self.copy, tuple(tests))
        if code != PASSED:
            raise Unhealthy(f"{' '.join(tests)} do not pass without any mutation:\n{printed[-4000:]}")
        self._limits_s |= dict.fromkeys(tests, 30 + 5 * (time.monotonic() - began))

    def limit_s(self, test: str) -> float:
        """How long `test` may take with a mutation: several times what it takes here. Raises Unhealthy."""
        if test not in self._limits_s:
            self.try_all((test,))
        return self._limits_s[test]


@dataclass(frozen=True)
class Verdict:
    """What the tests of a mutation did."""

    mutation: Mutation
    survived: str  # empty when each test failed, as it must; otherwise what was seen
    hanging: tuple[str, ...]  # tests that noticed by never ending

    @property
    def word(self) -> str:
        return "SURVIVES" if self.survived else "hangs" if self.hanging else "noticed"


def judge(mutation: Mutation, target: Path, whole: Whole) -> Verdict:
    """Runs each test of the mutation against a copy at `target`. Raises Unhealthy."""
    copy = write_copy(target, mutation, whole.copy)
    hanging = []
    for test in mutation.tests:
        code, printed = run_tests(copy, (test,), whole.limit_s(test))
        if code == HANGS:
            hanging.append(test)
        elif code != FAILED:
            seen = f"{mutation.name}: {test} ended with code {code}, expected a failure\n{printed[-2000:]}"
            return Verdict(mutation, seen, tuple(hanging))
    return Verdict(mutation, "", tuple(hanging))
