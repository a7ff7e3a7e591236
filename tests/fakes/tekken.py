"""tekken.json files: a small one to write, and what a large one says in tiktoken's words."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any


def reference(file: dict[str, Any]) -> tuple[dict[str, Any], dict[bytes, int]]:
    """(config, the bytes of each token → its rank), of the tokens that the vocabulary's size leaves room for."""
    config = file["config"]
    size = config["default_vocab_size"] - config["default_num_special_tokens"]
    return config, {base64.b64decode(token["token_bytes"]): token["rank"] for token in file["vocab"][:size]}


def write_small(folder: Path, tokens: list[bytes], specials: int = 3, **changes: Any) -> Path:
    """A vocabulary of the 256 bytes and these tokens. Returns the folder."""
    ranked = [bytes([byte]) for byte in range(256)] + tokens
    file = {
        "config": {
            "pattern": r"\s?\w+|\s|[^\w\s]+",
            "default_vocab_size": len(ranked) + specials,
            "default_num_special_tokens": specials,
        },
        "vocab": [{"rank": rank, "token_bytes": base64.b64encode(data).decode()} for rank, data in enumerate(ranked)],
        **changes,
    }
    (folder / "tekken.json").write_text(json.dumps(file), encoding="utf-8")
    return folder
