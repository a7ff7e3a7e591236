"""Runs tests in Triton's interpreter, in a process of its own: it must be chosen before anything imports Triton, and
torch may have done so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

UNIT = Path(__file__).parents[1] / "unit"
INTERPRETED = UNIT / "kernels" / "interpreted"


def run_interpreted(*tests: str) -> None:
    """Fails with all that pytest said when it does."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *tests, "-p", "no:cacheprovider"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
