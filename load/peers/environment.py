"""An environment of its own for each peer: made once, below the cache folder, with pinned versions.

    python -m load.peers.install_NAME [--model smollm2] [--nice 0]

A step that was done is not done again: `done` files name what was asked for, so a changed version installs anew.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from minisgl_backend.models.locate import cache_folder, locate_model


class CanNotInstall(Exception):
    """A sentence that says what can not be had, and where the log is."""


@dataclass(frozen=True)
class Environment:
    """The folder of one peer."""

    folder: Path

    @classmethod
    def of(cls, name: str) -> Environment:
        """Where the peer called `name` lives, installed or not."""
        return cls(cache_folder() / "peers" / name)

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    @property
    def log(self) -> Path:
        return self.folder / "install.log"

    def model(self, model: str, kind: str) -> Path:
        """Where a converted model lies: a file or a folder."""
        return self.folder / "models" / f"{locate_model(model).name}-{kind}"

    def make(self, packages: Sequence[str], unwanted: Sequence[str] = ()) -> None:
        """A virtual environment with these packages. unwanted: dependencies that are taken out again."""

        def install() -> None:
            self.run(sys.executable, "-m", "venv", "--clear", str(self.folder / "venv"))
            self.pip("install", *packages)
            if unwanted:
                self.pip("uninstall", "--yes", *unwanted)

        self.once("venv", " ".join((*packages, *(f"-{package}" for package in unwanted))), install)

    def pip(self, *arguments: str) -> None:
        """pip of this environment."""
        self.run(str(self.python), "-m", "pip", "--disable-pip-version-check", *arguments)

    def run(self, *command: str) -> None:
        """A command whose output goes to the log. Raises CanNotInstall with its last line."""
        with self.log.open("ab") as log:
            code = subprocess.run(command, stdout=log, stderr=log).returncode
        if code:
            last = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()][-1:]
            raise CanNotInstall(f"{' '.join(command)[:120]} failed ({code}): {''.join(last)}; its log: {self.log}")

    def once(self, step: str, wanted: str, act: Callable[[], None]) -> None:
        """`act`, unless it was done for the same `wanted` before."""
        self.folder.mkdir(parents=True, exist_ok=True)
        done = self.folder / f"{step}.done"
        if done.exists() and done.read_text() == wanted:
            print(f"{self.folder.name}: {step} is there", flush=True)
            return
        print(f"{self.folder.name}: {step} … (log: {self.log})", flush=True)
        done.unlink(missing_ok=True)
        act()
        done.write_text(wanted)

    @contextmanager
    def fresh(self, target: Path) -> Iterator[Path]:
        """A path to write to that becomes `target` when the block ends well."""
        partial = target.with_name(target.name + ".partial")
        for path in (partial, target):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.rename(target)


def install(name: str, steps: Callable[[Environment, str], None]) -> None:
    """The command line of every install script. steps(environment, model)."""
    parser = argparse.ArgumentParser(prog=f"python -m load.peers.install_{name}")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--nice", type=int, default=0, help="added to the niceness of all that is started")
    arguments = parser.parse_args()
    os.nice(arguments.nice)
    try:
        steps(Environment.of(name), arguments.model)
    except CanNotInstall as error:
        raise SystemExit(f"can not install {name}: {error}") from None
    print(f"{name}: installed")
