"""Where a model lies: a name we can fetch, a local folder or GGUF file, or a hub id → the folder or the file.

First step of every start, before anything reads weights; also the command line's check of `--model`. Loads no torch.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from minisgl_backend.config import nearest
from minisgl_backend.errors import ModelNotFound
from minisgl_backend.models.files import GGUF_SUFFIX, is_gguf

CACHE_VARIABLE = "MINISGL_CACHE"
"""Environment variable: the folder of fetched models, instead of the user's cache folder."""

FETCHABLE = {"smollm2": "smollm2-135m-instruct-v1", "smollm2-gguf": "smollm2-135m-instruct-gguf-v1"}
"""Name for `minisgl fetch` → its folder in the cache. The number is raised when the conversion changes."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer*", "vocab*")  # never pickles, never code


def locate_model(model: str) -> Path:
    """`model` (a fetched name, a local Hugging Face folder, a GGUF file or a folder with one, or a hub id) → the folder
    with a config.json or the .gguf file, absolute.

    A hub id is taken from the hub's local cache when it is complete there, else downloaded (safetensors, JSON and
    tokenizer files only). Raises ModelNotFound with one sentence that says what to do.
    """
    if model in FETCHABLE:
        folder = fetched_folder(model)
        if not folder.is_dir():
            raise ModelNotFound(f"model {model!r} was never fetched: run `minisgl fetch {model}`")
        return _local_folder(folder)
    local = Path(model).expanduser()
    if model and local.exists():
        return _local_folder(local)
    if not _HUB_ID.fullmatch(model):
        if model.startswith(("/", "./", "../", "~")) or model.endswith("/") or model.count("/") > 1:
            raise ModelNotFound(f"model folder {model!r} does not exist")
        hint = nearest(model, tuple(FETCHABLE))
        raise ModelNotFound(f"model {model!r} is no folder, no hub id (org/name) and no fetchable name{hint}")
    return _hub_folder(model)


def fetched_folder(name: str) -> Path:
    """The cache folder of a fetchable name. It exists if and only if it is complete: it gets its name last."""
    return cache_folder() / FETCHABLE[name]


def cache_folder() -> Path:
    """$MINISGL_CACHE, else $XDG_CACHE_HOME/minisgl, else ~/.cache/minisgl. May not exist yet.

    Who has no home, as a user that a container does not know, has the root folder, as Docker says.
    """
    if given := os.environ.get(CACHE_VARIABLE):
        return Path(given).expanduser().absolute()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "minisgl"
    except RuntimeError:
        return Path("/.cache/minisgl")


def _local_folder(folder: Path) -> Path:
    if is_gguf(folder):
        return folder.absolute()
    if not folder.is_dir():
        raise ModelNotFound(f"model {str(folder)!r} is a file; a Hugging Face folder or a .gguf file is needed")
    if (folder / "config.json").is_file():
        return folder.absolute()
    inside = sorted(folder.glob(f"*{GGUF_SUFFIX}"))
    if len(inside) > 1:
        raise ModelNotFound(f"model folder {str(folder)!r} holds {len(inside)} GGUF files: name one of them")
    if not inside:
        raise ModelNotFound(f"model folder {str(folder)!r} holds no config.json and no .gguf file")
    return inside[0].absolute()


def _hub_folder(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    def snapshot(*, local: bool) -> Path:
        return Path(
            snapshot_download(hub_id, allow_patterns=list(_HUB_FILES), ignore_patterns=["*/*"], local_files_only=local)
        )

    try:
        folder = snapshot(local=True)
        if _is_complete(folder):
            return folder
    except (LocalEntryNotFoundError, HFValidationError):
        pass
    try:
        folder = snapshot(local=False)
    except Exception as error:  # the hub client's errors and those of its network library have no common root
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelNotFound(
            f"model {hub_id!r} is no folder here and can not be had from the hub: {reason[0]}"
        ) from None
    return _local_folder(folder)


def _is_complete(folder: Path) -> bool:
    """Whether an earlier download, perhaps interrupted, left all weights."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return all((folder / shard).is_file() for shard in shards)
    return any(folder.glob("*.safetensors"))
