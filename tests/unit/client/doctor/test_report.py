"""The text and the JSON of `minisgl doctor`."""

from __future__ import annotations

import json

import pytest

from minisgl_client.doctor.checks import Finding, Level
from minisgl_client.doctor.report import as_json, as_text, without_home

FINDINGS = (
    Finding("disk", Level.OK, "9 GiB free at /home/ada/.cache/minisgl"),
    Finding("/dev/shm", Level.FAIL, "2 MiB free", "start the container with --shm-size=1g"),
)


def test_the_text_has_a_line_per_finding_with_its_advice_below() -> None:
    assert as_text(FINDINGS, "0.1.0", "/home/ada") == (
        "minisgl 0.1.0\n"
        "\n"
        "ok    disk      9 GiB free at ~/.cache/minisgl\n"
        "fail  /dev/shm  2 MiB free\n"
        "                → start the container with --shm-size=1g\n"
        "\n"
        "`minisgl serve` can not work here: 1 failed"
    )


def test_without_a_failure_the_text_ends_with_good_news() -> None:
    assert as_text(FINDINGS[:1], "0.1.0", "/home/ada").endswith("`minisgl serve` can work here")


def test_the_json_holds_the_same() -> None:
    told = json.loads(as_json(FINDINGS, "0.1.0", "/home/ada"))
    assert (told["version"], told["can_serve"]) == ("0.1.0", False)
    assert told["findings"][0] == {
        "check": "disk",
        "level": "ok",
        "says": "9 GiB free at ~/.cache/minisgl",
        "advice": "",
    }


@pytest.mark.parametrize(
    ("text", "home", "told"),
    [
        ("/root/x and /root", "/root", "~/x and ~"),
        ("/root/x", "/root/", "~/x"),
        ("/rootless/x /root.d", "/root", "/rootless/x /root.d"),
        ("/x", "/", "/x"),
        ("/x", "", "/x"),
    ],
)
def test_the_home_folder_is_written_short_and_nothing_else_is(text: str, home: str, told: str) -> None:
    assert without_home(text, home) == told
