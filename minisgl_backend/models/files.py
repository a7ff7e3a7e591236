"""The small files of a model by their names in a Hugging Face folder: they lie in one, or come out of a GGUF file.

    locate.py ── path ──► open_files ─┬─ a folder ─► its files
                                      └─ a .gguf ──► gguf_files.py writes them from the metadata

Where it stands in the flow: between `locate.py` and all who read a part of the model: folder.py (the spec), the
tokenizer, the defaults of sampling. The weights have a seam of their own, `checkpoint.TensorSource`. Loads no torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from minisgl_backend.errors import ModelNotFound, ModelUnsupported
from minisgl_backend.models.gguf_files import GgufFiles

GGUF_SUFFIX = ".gguf"


class ModelFiles(Protocol):
    """Files by name. Raises ModelUnsupported for one that is there and can not be read."""

    @property
    def path(self) -> Path:
        """The folder, or the one file."""
        ...

    def text(self, name: str) -> str | None:
        """The whole file; None: there is none of this name."""
        ...


class FolderFiles:
    """See ModelFiles."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def text(self, name: str) -> str | None:
        path = self.path / name
        try:
            if path.exists() and not path.is_file():  # a folder; or a pipe, which would never end
                return None
            return path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise ModelUnsupported(f"{path} can not be read: {error}") from None


def open_files(path: Path) -> ModelFiles:
    """A model's folder or GGUF file → its small files. Raises ModelNotFound, ModelUnsupported."""
    if is_gguf(path):
        return GgufFiles(path)
    if not path.is_dir():
        raise ModelNotFound(f"there is no model folder {str(path)!r}")
    return FolderFiles(path)


def is_gguf(path: Path) -> bool:
    """Whether a path names one GGUF file instead of a folder."""
    return path.suffix == GGUF_SUFFIX and path.is_file()


def read_object(files: ModelFiles, name: str) -> dict[str, Any] | None:
    """A file that must hold a JSON object; None: there is none. Raises ModelUnsupported."""
    text = files.text(name)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelUnsupported(f"{files.path / name} can not be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelUnsupported(f"{files.path / name} must hold a JSON object")
    return value
