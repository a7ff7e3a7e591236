"""The benchmark of starts: what it reads of a server's lines, and that a dropped file is no longer in memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from load.bench.start import Start, drop, row, stages_of

LINES = [
    "[   0.1 s] model     smollm2",
    "[   3.3 s] warm up   ready: 93200 tokens of KV, started in 3.2 s (processes 0.9, torch 1.7, warm up 0.6)",
    "",
    "ready after 3.4 s (model 0.0, start 2.1, warm up 0.7)",
]


def test_the_stages_are_read_as_they_are_printed() -> None:
    assert stages_of(LINES, "ready after") == (3.4, {"model": 0.0, "start": 2.1, "warm up": 0.7})
    assert stages_of(LINES, "started in") == (3.2, {"processes": 0.9, "torch": 1.7, "warm up": 0.6})
    assert stages_of(LINES[:1], "started in") == (0.0, {})


def test_a_start_is_told_in_a_line() -> None:
    start = Start("warm", 2.1, {"model": 0.0, "start": 2.1}, {}, 3.4)
    assert row(start) == "warm      2.1 s (model 0.0, start 2.1); engine: was there; 3 MiB read"


def is_in_memory(file: Path) -> bool:
    """Whether its first page can be read without asking the disk."""
    with file.open("rb") as opened:
        try:
            return os.preadv(opened.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT) == 1
        except BlockingIOError:
            return False
        except OSError as error:
            pytest.skip(f"this file system does not tell: {error}")


def test_what_is_dropped_is_read_from_the_disk_again_and_only_that(tmp_path: Path) -> None:
    below, beside = tmp_path / "one" / "two" / "file", tmp_path / "file"
    below.parent.mkdir(parents=True)
    for file in (below, beside):
        file.write_bytes(bytes(1 << 16))
    (tmp_path / "one" / "link").symlink_to(beside)
    os.mkfifo(tmp_path / "one" / "pipe")  # nobody waits for its writer
    if not is_in_memory(below):
        pytest.skip("this file system keeps nothing in memory")
    drop([tmp_path / "one"])
    assert (is_in_memory(below), is_in_memory(beside)) == (False, True)
