"""A copy of the package with one line of it reverted, and a run of the tests that must notice.

Where it stands in the flow: `rules.py` names what to revert; `__main__.py` and `test_mutations.py` run it. The
checkout is never touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "minisgl_backend"

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
        path = target / PACKAGE / mutation.file
        path.write_text(mutated(mutation, path.read_text()))
    return target


def run_tests(copy: Path, tests: tuple[str, ...], timeout_s: float = 600) -> tuple[int, str]:
    """Runs `tests` against the copy: pytest's exit code (0 passed, 1 failed; -1 no end) and what it printed."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join((str(copy), str(ROOT / "client"))))
    environment.pop("HYPOTHESIS_PROFILE", None)
    arguments = ["-q", "-x", "--no-header", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *tests]
    command = [sys.executable, "-P", "-c", _RUN, str(copy), *arguments]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return -1, f"no end within {timeout_s:g} s"
    return done.returncode, done.stdout + done.stderr


def survives(mutation: Mutation, target: Path, source: Path = ROOT) -> str:
    """Empty when each test of the mutation fails, as it must; otherwise what was seen."""
    copy = write_copy(target, mutation, source)
    for test in mutation.tests:
        code, printed = run_tests(copy, (test,))
        if code != 1:
            return f"{mutation.name}: {test} ended with code {code}, expected a failure\n{printed[-2000:]}"
    return ""
