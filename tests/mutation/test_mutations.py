"""Every rule can be reverted by its mutation, and the reverted overlap rules are noticed. `make mutation` runs all."""

from __future__ import annotations

from pathlib import Path

import pytest

from mutation.copies import PACKAGE, ROOT, Mutation, SourceMoved, mutated, run_tests, survives, write_copy
from mutation.rules import MUTATIONS

OVERLAP = [one for one in MUTATIONS if one.name.startswith("fault")]


def by_name(mutation: Mutation) -> str:
    return mutation.name


@pytest.mark.parametrize("mutation", MUTATIONS, ids=by_name)
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
    code, printed = run_tests(
        write_copy(tmp_path / "whole", None), tuple(sorted({test for one in OVERLAP for test in one.tests}))
    )
    assert code == 0, printed
    for number, mutation in enumerate(OVERLAP):
        assert not survives(mutation, tmp_path / str(number))
