"""The types of what a GGUF file's metadata says: checked once, where a file is opened as a model. Pure.

Where it stands in the flow: between gguf_file.py, which reads values of whatever type, and gguf_config.py and
gguf_tokenizer.py, which calculate with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minisgl_backend.errors import ModelUnsupported


def check_metadata(metadata: Mapping[str, Any], architecture: str, name: str) -> None:
    """architecture: the file's, before whose keys it stands. name: of the file. Raises ModelUnsupported naming the key.

    A key that is absent is right here: who needs it says so.
    """
    for prefix, kinds in (("", _GENERAL), (f"{architecture}.", _ARCHITECTURE)):
        for wanted, is_right, keys in kinds:
            for key in keys:
                value = metadata.get(prefix + key)
                if value is not None and not is_right(value):
                    raise ModelUnsupported(f"{name}: {prefix}{key} must be {wanted}, got {_short(value)}")


def _is_whole(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _list_of(*types: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(type(entry) in types for entry in value)


def _short(value: Any) -> str:
    """As a message can show it: a list may have hundreds of thousands of entries."""
    text = repr(value[:3] if isinstance(value, list) else value)
    return f"{text[:60]}…" if len(text) > 60 or (isinstance(value, list) and len(value) > 3) else text


_Kind = tuple[str, Callable[[Any], bool], Sequence[str]]

_SPECIAL_TOKENS = ("bos", "eos", "eot", "eom", "padding", "unknown")
_WHOLE = "a whole number of at least 0"
_GENERAL: Sequence[_Kind] = (
    (_WHOLE, _is_whole, ("split.count", *(f"tokenizer.ggml.{token}_token_id" for token in _SPECIAL_TOKENS))),
    ("a list of strings", _list_of(str), ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")),
    ("a list of whole numbers", _list_of(int), ("tokenizer.ggml.token_type",)),
    ("a list of numbers", _list_of(int, float), ("tokenizer.ggml.scores",)),
    ("a string", lambda value: isinstance(value, str), ("tokenizer.chat_template",)),
)
_ARCHITECTURE: Sequence[_Kind] = (
    (
        _WHOLE,
        _is_whole,
        (
            "context_length",
            "embedding_length",
            "expert_count",
            "attention.head_count",
            "attention.key_length",
            "block_count",
            "rope.dimension_count",
        ),
    ),
    ("a number", _is_number, ("rope.freq_base",)),
)
"""What a value must be in words, as a function, and the keys that must be so."""
