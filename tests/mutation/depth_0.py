"""`make depth-0`, or `python -m tests.mutation.depth_0 [ARGUMENTS of pytest]`: the tests in a copy of the checkout
whose setting `overlap` is off by default.

Where it stands in the flow: by hand and before a release. What must be true at both depths is tested at both by tests
that choose (`tests/sim/conftest.py`); this runs all others at depth 0 too, servers of the end-to-end tests included.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from .copies import Mutation, seeing, write_checkout

DEPTH_0 = Mutation(
    "the next step is planned while one runs",
    "config.py",
    "overlap: bool = True",
    "overlap: bool = False",
    (),
    "depth-0",
)


def main(arguments: list[str]) -> int:
    """pytest's exit code. The mutations are left out: they name the text as it stands."""
    with tempfile.TemporaryDirectory() as folder:
        copy = write_checkout(Path(folder) / "copy", DEPTH_0)
        command, environment = seeing(copy, ("--ignore=tests/mutation", *arguments), copy)
        return subprocess.run(command, cwd=copy, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
