"""Members of a tokenizer.json, for those who write one from another format: tekken.json, GGUF. Pure."""

from __future__ import annotations

from typing import Any

BYTE_LEVEL: dict[str, Any] = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}
"""GPT-2's printable alphabet for bytes: as a pre-tokenizer (of pieces that are split already) and as a decoder."""


def added_token(i: int, content: str, *, special: bool) -> dict[str, Any]:
    """An entry of `added_tokens`: cut out of a text before anything else."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": i, "content": content, **flags, "special": special}


def split_by(pattern: str) -> dict[str, Any]:
    """A pre-tokenizer: each match of the regex is a piece of its own, and what lies between two is another."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def bos_first(bos: str, bos_id: int) -> dict[str, Any]:
    """A post-processor: this token stands in front of a text."""
    first, text = {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }
