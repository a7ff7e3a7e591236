"""The environments of the client stacks: below .venv/clients one each, made at first use and kept.

    STACK.txt (pins) ──► .venv/clients/STACK-HASH
                           its own packages, installed as they stand: nothing is resolved, nothing compiled
                           + shared.pth ──► what `.venv` has in a version that does, seen after its own

The hash is over all that goes into one, so editing a pin makes another and removes the old. That every requirement of
every package is met is checked inside (`checks.py`), since pip is told not to look. `python -m clients.environments`,
in tests/, makes all of them.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

HERE = Path(__file__).parent
STACKS = {"langchain": "LangChain", "litellm": "litellm", "llama_index": "LlamaIndex"}
"""Their pins are NAME.txt, their checks with_NAME.py; and their headings in docs/clients.md."""


def python_of(stack: str) -> Path:
    """The interpreter of a stack's environment, which is there when this returns; processes wait for each other."""
    root = Path(sys.prefix) / "clients"
    root.mkdir(exist_ok=True)
    with (root / f"{stack}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = root / f"{stack}-{_hash(HERE / f'{stack}.txt')}"
        if not (folder / "complete").exists():
            for old in root.glob(f"{stack}-*"):
                shutil.rmtree(old)
            _make(folder, HERE / f"{stack}.txt")
            (folder / "complete").touch()
    return folder / "bin" / "python"


def _hash(pins: Path) -> str:
    constraints = HERE.parents[1] / "constraints.txt"
    parts = [sys.version.encode(), pins.read_bytes(), constraints.read_bytes()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def _make(folder: Path, pins: Path) -> None:
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-compile"]
    command += ["--disable-pip-version-check", "--retries", "10", "--only-binary", ":all:", "-r", str(pins)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{pins.name} could not be installed:\n{done.stdout}"
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")


if __name__ == "__main__":
    for name in STACKS:
        began_s = time.monotonic()
        print(f"{python_of(name)}  {time.monotonic() - began_s:.1f} s")
