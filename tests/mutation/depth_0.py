"""`make depth-0`, or `python -m tests.mutation.depth_0 [ARGUMENTS of pytest]`: the tests with a copy of the package
whose setting `overlap` is off by default.

Where it stands in the flow: by hand and before a release. What must be true at both depths is tested at both by tests
that choose (`tests/sim/conftest.py`); this runs all others at depth 0 too, servers of the end-to-end tests included.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from .copies import ROOT, Mutation, seeing, write_copy

DEPTH_0 = Mutation(
    "the next step is planned while one runs",
    "config.py",
    "overlap: bool = True",
    "overlap: bool = False",
    (),
    "depth-0",
)


def main(arguments: list[str]) -> int:
    """pytest's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        command, environment = seeing(write_copy(Path(folder), DEPTH_0), arguments)
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
