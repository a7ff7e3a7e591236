"""`minisgl doctor`: whether `minisgl serve` can work on this machine, and what to install where it can not.

Exit code 0 when it can (warnings included), 1 when it can not. Its text is what a bug report should hold.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `doctor` to the command line."""
    parser = commands.add_parser("doctor", help="check this machine", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="the findings as JSON, for scripts")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the findings on stdout."""
    from minisgl_client.doctor import checks, probe, report

    findings = checks.judge(probe.gather(os.environ))
    write = report.as_json if arguments.json else report.as_text
    print(write(findings, probe.own_version(), str(Path.home())))
    return 0 if checks.can_serve(findings) else 1
