"""The findings of `minisgl doctor` as text for people and bug reports, and as JSON for scripts.

Both may be published: they hold no variable of the environment, and the home folder is written `~`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from minisgl_client.doctor.checks import Finding, Level, can_serve


def as_text(findings: Sequence[Finding], version: str, home: str) -> str:
    """A line per finding, its advice below it, a sentence at the end."""
    width = max(len(finding.check) for finding in findings)
    lines = [f"minisgl {version}", ""]
    for finding in findings:
        lines.append(f"{finding.level:<4}  {finding.check:<{width}}  {finding.says}")
        if finding.advice and finding.level is not Level.OK:
            lines.append(f"{'':<4}  {'':<{width}}  → {finding.advice}")
    failed = sum(finding.level is Level.FAIL for finding in findings)
    lines += [
        "",
        "`minisgl serve` can work here" if not failed else f"`minisgl serve` can not work here: {failed} failed",
    ]
    return without_home("\n".join(lines), home)


def as_json(findings: Sequence[Finding], version: str, home: str) -> str:
    """{"version", "can_serve", "findings": [{"check", "level", "says", "advice"}]}"""
    rows = [
        {
            "check": finding.check,
            "level": finding.level.value,
            "says": without_home(finding.says, home),
            "advice": finding.advice,
        }
        for finding in findings
    ]
    return json.dumps({"version": version, "can_serve": can_serve(tuple(findings)), "findings": rows}, indent=2)


def without_home(text: str, home: str) -> str:
    """The home folder tells who somebody is. "/" is nobody's."""
    folder = home.rstrip("/")
    return re.sub(re.escape(folder) + r"(?![\w.-])", "~", text) if folder else text
