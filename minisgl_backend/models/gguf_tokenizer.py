"""The vocabulary of a GGUF file → the text of a tokenizer.json. Pure.

Two kinds: byte-level BPE (`tokenizer.ggml.model` = gpt2), whose merges stand in the file and whose splitting into words
has a name there (`tokenizer.ggml.pre`); and SentencePiece's BPE (llama), which has scores instead of merges. Sources:
`src/llama-vocab.cpp` of llama.cpp for what the names mean, the models' own tokenizer.json for how it is written.

Where it stands in the flow: `gguf_files.py`, for text/tokenizer.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minisgl_backend.errors import ModelUnsupported
from minisgl_backend.models.tokenizer_json import BYTE_LEVEL, added_token, bos_first, split_by

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6  # in tokenizer.ggml.token_type
_SPACE = "▁"

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{digits}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}"
_LLAMA3 = _WORDS.replace("{digits}", "{1,3}")
_QWEN2 = _WORDS.replace("{digits}", "")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{end}}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{end}}"
    rf"|\p{{N}}{{digits}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"
)
_TEKKEN = _CASED.replace("{end}", "").replace("{digits}", "")
_GPT4O = _CASED.replace("{end}", f"{_CONTRACTIONS}?").replace("{digits}", "{1,3}")


@dataclass(frozen=True, slots=True)
class _Words:
    """How a byte-level vocabulary's texts fall into words, and what else its name implies."""

    patterns: tuple[str, ...]  # one after the other, each splits what the ones before have left
    whole_words: bool = False  # a word that is a token is that token, whatever the merges say
    bos: bool = False  # unless the file says otherwise
    nfc: bool = False


_DIGITS = _Words((r"\p{N}", _GPT2))
_PLAIN = _Words((_GPT2,))
_BY_PRE: Mapping[str, _Words] = {
    "gpt-2": _PLAIN,
    "olmo": _PLAIN,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "codeshell": _DIGITS,
    "llama-bpe": _Words((_LLAMA3,), whole_words=True, bos=True),
    "llama3": _Words((_LLAMA3,), whole_words=True, bos=True),
    "llama-v3": _Words((_LLAMA3,), whole_words=True, bos=True),
    "dbrx": _Words((_LLAMA3,)),
    "qwen2": _Words((_QWEN2,), nfc=True),
    "deepseek-r1-qwen": _Words((_QWEN2,), nfc=True),
    "tekken": _Words((_TEKKEN,), whole_words=True, bos=True),
    "gpt-4o": _Words((_GPT4O,)),
}
"""`tokenizer.ggml.pre` → what it means."""


def tokenizer_json(metadata: Mapping[str, Any], name: str) -> str:
    """name: of the file, for messages. Raises ModelUnsupported: there is no vocabulary, or one of another kind."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelUnsupported(f"{name} holds no vocabulary: tokenizer.ggml.tokens is missing")
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelUnsupported(f"{name}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    match metadata.get("tokenizer.ggml.model"):
        case "gpt2":
            made, bos = _byte_level(metadata, name, tokens)
        case "llama":
            made, bos = _sentencepiece(metadata, name, tokens, types), True
        case kind:
            raise ModelUnsupported(f"{name}: tokenizer.ggml.model {kind!r} is not supported; gpt2 and llama are")
    added = [
        added_token(i, tokens[i], special=kind == _CONTROL)
        for i, kind in enumerate(types)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token", bos and bos_id is not None):
        if bos_id is None or bos_id >= len(tokens):
            raise ModelUnsupported(f"{name}: tokenizer.ggml.bos_token_id must be a token's id, got {bos_id!r}")
        made["post_processor"] = bos_first(tokens[bos_id], bos_id)
    return json.dumps({"version": "1.0", "added_tokens": added, **made}, ensure_ascii=False)


def _byte_level(metadata: Mapping[str, Any], name: str, tokens: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """The members of a tokenizer.json, and whether a text begins with the BOS token."""
    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in _BY_PRE:
        raise ModelUnsupported(f"{name}: tokenizer.ggml.pre {pre!r} is not supported; {', '.join(_BY_PRE)} are")
    words = _BY_PRE[pre]
    merges = [merge.split(" ") for merge in metadata.get("tokenizer.ggml.merges") or ()]
    if not merges or any(len(pair) != 2 for pair in merges):
        raise ModelUnsupported(f"{name}: tokenizer.ggml.merges must hold pairs of tokens")
    splits = [split_by(pattern) for pattern in words.patterns]
    return {
        "normalizer": {"type": "NFC"} if words.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, BYTE_LEVEL]},
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "ignore_merges": words.whole_words,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges,
        },
    }, words.bos


def _sentencepiece(
    metadata: Mapping[str, Any], name: str, tokens: Sequence[str], types: Sequence[int]
) -> dict[str, Any]:
    """The members of a tokenizer.json. A character outside the vocabulary becomes the tokens of its bytes."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelUnsupported(f"{name}: tokenizer.ggml.scores must hold a number for each of {len(tokens)} tokens")
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    unknown = [tokens[i] for i, kind in enumerate(types) if kind == _UNKNOWN]
    undo: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*([{"type": "Prepend", "prepend": _SPACE}] if prefix else []), spaces],
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [*undo, *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else [])],
        },
        "model": {
            "type": "BPE",
            "unk_token": unknown[0] if unknown else None,
            "fuse_unk": True,
            "byte_fallback": _BYTE in types,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": _merges(tokens, scores, types),
        },
    }


def _merges(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """SentencePiece joins those two neighbours first whose joined token has the highest score: all pairs that make a
    token, in that order.
    """
    id_of = {token: i for i, token in enumerate(tokens) if types[i] == _NORMAL}
    pairs = []
    for i in sorted(id_of.values(), key=lambda i: (-scores[i], i)):
        token = tokens[i]
        halves = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [half for half in halves if half[0] in id_of and half[1] in id_of]
        pairs += sorted(known, key=lambda half: (id_of[half[0]], id_of[half[1]]))
    return pairs
