"""Every rule can be reverted by its mutation, and the reverted overlap rules are noticed. `make mutation` runs all."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from mutation.copies import HANGS, PACKAGE, ROOT, Mutation, SourceMoved, Whole, judge, mutated, run_tests, write_copy
from mutation.depth_0 import DEPTH_0
from mutation.rules import MUTATIONS

OVERLAP = [one for one in MUTATIONS if one.name.startswith("fault")]


def by_name(mutation: Mutation) -> str:
    return mutation.name


@pytest.mark.parametrize("mutation", (*MUTATIONS, DEPTH_0), ids=by_name)
def test_the_text_that_a_mutation_replaces_stands_once_in_the_package(mutation: Mutation) -> None:
    mutated(mutation, (ROOT / PACKAGE / mutation.file).read_text())


@pytest.mark.parametrize("mutation", MUTATIONS, ids=by_name)
def test_the_tests_that_a_mutation_names_exist(mutation: Mutation) -> None:
    assert mutation.tests
    for test in mutation.tests:
        file, _, function = test.partition("::")
        assert f"def {function.partition('[')[0]}(" in (ROOT / file).read_text(), test


def test_names_are_unique() -> None:
    assert len({one.name for one in MUTATIONS}) == len(MUTATIONS)


def test_a_mutation_whose_text_is_gone_fails_loudly() -> None:
    gone = Mutation("none", "errors.py", "no such text", "", (), "gone")
    with pytest.raises(SourceMoved, match=r"gone: its text stands 0 times in minisgl_backend/errors\.py"):
        mutated(gone, "text\n")


@pytest.mark.slow
def test_the_five_overlap_rules_pass_untouched_and_each_reverted_one_is_noticed(tmp_path: Path) -> None:
    assert len(OVERLAP) == 5
    whole = Whole(write_copy(tmp_path / "whole", None))
    whole.try_all(sorted({test for mutation in OVERLAP for test in mutation.tests}))
    for mutation in OVERLAP:
        assert judge(mutation, tmp_path / mutation.name, whole).word == "noticed"


@pytest.mark.slow
def test_a_test_without_an_end_is_ended_with_what_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    (tmp_path / "test_hanging.py").write_text(
        "import pathlib, subprocess, sys\n"
        "def test_hangs():\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        f"    pathlib.Path({str(pid)!r}).write_text(str(child.pid))\n"
        "    child.wait()\n"
    )
    copy = write_copy(tmp_path / "whole", None)
    for timeout_s in (4, 16, 64, 256):  # the first in which it has begun
        code, printed = run_tests(copy, (f"{tmp_path}/test_hanging.py",), timeout_s)
        assert (code, printed.splitlines()[-1]) == (HANGS, f"no end within {timeout_s} s")
        if pid.exists():
            break
    assert not psutil.pid_exists(int(pid.read_text()))
