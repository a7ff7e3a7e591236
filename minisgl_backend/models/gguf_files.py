"""A GGUF file as the small files of a Hugging Face folder, made when they are asked for.

See files.py. Loads no torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minisgl_backend.models.gguf_config import gguf_family, model_config, token_ids, tokenizer_config
from minisgl_backend.models.gguf_file import GgufFile
from minisgl_backend.models.gguf_tokenizer import tokenizer_json

GGUF_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
"""What there is; all other names are absent."""


class GgufFiles:
    """See ModelFiles. Raises ModelUnsupported: it is no GGUF file, or one of an architecture that is not supported."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GgufFile(path)
        self._family = gguf_family(self._file)

    def text(self, name: str) -> str | None:
        if name == "tokenizer.json":
            return tokenizer_json(self._file.metadata, self.path.name)
        value = self._object(name)
        return None if value is None else json.dumps(value, indent=2, ensure_ascii=False) + "\n"

    def _object(self, name: str) -> dict[str, Any] | None:
        match name:
            case "config.json":
                return model_config(self._file, self._family)
            case "generation_config.json":
                return token_ids(self._file.metadata)
            case "tokenizer_config.json":
                return tokenizer_config(self._file.metadata)
        return None
