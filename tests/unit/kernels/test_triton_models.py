"""Attention and whole models on the Triton kernels, in Triton's interpreter."""

from __future__ import annotations

import pytest

from fakes.interpreted import INTERPRETED, UNIT, run_interpreted

ATTENTION = {
    "test_broken_values.py": ["test_a_row_with_fewer_pages_than_its_group_is_not_filled_up_with_its_own_broken_one"],
    "test_backends.py": [
        "test_a_row_sees_what_another_row_of_the_same_step_writes_to_a_shared_page",
        "test_sinks_that_are_not_declared_or_not_given_are_our_fault",
    ],
    "test_windows.py": ["test_pages_that_the_window_has_left_are_not_read"],
}
"""Of what every attention backend must do, as much as the interpreter does in seconds."""


@pytest.mark.slow
def test_the_tests_of_attention_and_whole_models_pass_in_the_interpreter() -> None:
    shared = [f"{UNIT / 'attention' / name}::{test}" for name, tests in ATTENTION.items() for test in tests]
    files = [str(INTERPRETED / f"test_{name}.py") for name in ("attention", "families", "whole_model")]
    run_interpreted(*files, *shared)


def test_every_file_of_the_interpreter_is_run_by_one_of_the_two_files() -> None:
    started = "".join(path.read_text() for path in (UNIT / "kernels").glob("test_triton_*.py"))
    names = [path.stem.removeprefix("test_") for path in INTERPRETED.glob("test_*.py")]
    assert names and all(f'"{name}"' in started for name in names)
