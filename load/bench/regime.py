"""Where numbers come from: what every benchmark puts into its last line beside them."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path


def regime() -> dict[str, object]:
    """Commit (with a + when files differ from it), machine and Python."""
    commit = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "commit": commit + ("+" if changed else ""),
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def _git(*arguments: str) -> str:
    folder = Path(__file__).parent
    return subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=folder).stdout.strip()


def _cpu_name() -> str:
    """As Linux names it; empty where it does not."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
