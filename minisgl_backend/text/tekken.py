"""Mistral's `tekken.json` → the text of a `tokenizer.json`, for folders that bring only the former.

Where it stands in the flow: `Tokenizer.load`. A tekken file lists the tokens' bytes by rank, as tiktoken does: of two
neighbours those join first whose joined token has the lowest rank. The tokenizers package wants the pairs instead: all
that make a token, in the order of its rank. Special tokens have the first ids, the ranks follow.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import msgspec

from minisgl_backend.errors import ModelUnsupported
from minisgl_backend.models.tokenizer_json import BYTE_LEVEL, added_token, bos_first, split_by
from minisgl_backend.text.byte_table import byte_level_text

_NAMES = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""Of the first special tokens, in a file that does not name them (Mistral's documentation of tekken v3)."""

_BOS, _EOS = "<s>", "</s>"


class _Config(msgspec.Struct):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int


class _Token(msgspec.Struct):
    rank: int
    token_bytes: str  # base64


class _Special(msgspec.Struct):
    rank: int
    token_str: str


class _File(msgspec.Struct):
    config: _Config
    vocab: list[_Token]
    special_tokens: list[_Special] | None = None


def named_tokens() -> dict[str, str]:
    """What a tokenizer_config.json would say of them."""
    return {"bos_token": _BOS, "eos_token": _EOS}


def tokenizer_json(path: Path) -> str:
    """Takes some seconds for a vocabulary of 130,000. Raises ModelUnsupported for what is no tekken file."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
        specials = _special_names(file)
        size = file.config.default_vocab_size - len(specials)
        ranked = [base64.b64decode(token.token_bytes) for token in sorted(file.vocab, key=lambda token: token.rank)]
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise ModelUnsupported(f"{path} can not be read as a tekken file: {error}") from None
    if clash := {byte_level_text(data) for data in ranked}.intersection(specials):
        raise ModelUnsupported(f"{path}: {sorted(clash)[0]!r} is both a special token and another one")
    if _BOS not in specials:
        raise ModelUnsupported(f"{path} has no {_BOS}")
    if not 256 <= size <= len(ranked):
        raise ModelUnsupported(f"{path} names {size} tokens and has {len(ranked)}")
    return json.dumps(_as_tokenizer(file.config.pattern, specials, ranked[:size]))


def _special_names(file: _File) -> list[str]:
    names = [f"<SPECIAL_{rank}>" for rank in range(file.config.default_num_special_tokens)]
    given = {token.rank: token.token_str for token in file.special_tokens or ()} or dict(enumerate(_NAMES))
    return [given.get(rank, name) for rank, name in enumerate(names)]


def _as_tokenizer(pattern: str, specials: list[str], ranked: list[bytes]) -> dict[str, object]:
    """The members of a tokenizer.json, byte-level. The BOS stands in front of a text, as Mistral's models want it."""
    strings = {data: byte_level_text(data) for data in ranked}
    ids = {name: i for i, name in enumerate(specials)}
    vocab = {strings[data]: len(specials) + rank for rank, data in enumerate(ranked)}
    return {
        "version": "1.0",
        "added_tokens": [added_token(i, name, special=True) for i, name in enumerate(specials)],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split_by(pattern), BYTE_LEVEL]},
        "post_processor": bos_first(_BOS, ids[_BOS]),
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "ignore_merges": True,
            "vocab": ids | vocab,
            "merges": [[strings[left], strings[right]] for left, right in _pairs(ranked)],
        },
    }


def _pairs(ranked: list[bytes]) -> list[tuple[bytes, bytes]]:
    """All pairs of tokens that join to a token, by its rank."""
    rank_of = {data: rank for rank, data in enumerate(ranked)}
    pairs: list[tuple[bytes, bytes]] = []
    for data in ranked:
        halves = [(data[:at], data[at:]) for at in range(1, len(data))]
        known = [(left, right) for left, right in halves if left in rank_of and right in rank_of]
        pairs += sorted(known, key=lambda pair: (rank_of[pair[0]], rank_of[pair[1]]))
    return pairs
