"""The bytes each token stands for, worked out once from the decoder that `tokenizer.json` describes.

Where it stands in the flow: `text/tokenizer.py` builds the table at load; `text/detokenizer.py` only joins its entries.
A table exists because the decoders of generative models treat every token alone. Those that do not (WordPiece joins
by neighbours, CTC merges repeats) are refused at load: for them no exact stream with a constant cost per token exists.

Taken: ByteLevel (GPT-2's printable alphabet for bytes); Metaspace; and the SentencePiece chain of Llama and Gemma,
Sequence[Replace ▁, ByteFallback, Fuse, Strip one leading space].

One difference from the `tokenizers` package, on purpose: its ByteFallback turns a whole run of byte tokens into
U+FFFD when any byte of the run is wrong, so a later token changes text that was already sent. Here bytes join with
their neighbours and only wrong bytes become U+FFFD. On valid UTF-8 both agree.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from minisgl_backend.errors import ModelUnsupported

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

_TAKEN = "ByteLevel, Metaspace, and a Sequence of Replace, ByteFallback, Fuse and Strip"


class TokenDecoder(msgspec.Struct, frozen=True):
    """How the strings of a vocabulary become bytes."""

    to_bytes: Callable[[str], bytes]  # a token's string in the vocabulary → its bytes
    strips_first_space: bool  # the text of a whole sequence loses one leading space (SentencePiece's dummy prefix)


def token_decoder(spec: dict[str, Any] | None) -> TokenDecoder:
    """The decoder that the "decoder" object of a tokenizer.json describes.

    Raises ModelUnsupported for a decoder whose tokens have no bytes of their own, naming it.
    """
    kind = spec.get("type") if spec else None
    if spec is None or not isinstance(kind, str):
        raise ModelUnsupported(f"the tokenizer has no decoder; supported are {_TAKEN}")
    if kind == "ByteLevel":
        return TokenDecoder(to_bytes=_byte_level, strips_first_space=False)
    if kind == "Metaspace":
        mark = spec.get("replacement", "▁")
        prefixed = spec.get("prepend_scheme", "always") != "never"
        return TokenDecoder(to_bytes=lambda token: token.replace(mark, " ").encode(), strips_first_space=prefixed)
    if kind == "Sequence":
        return _sentencepiece(spec.get("decoders") or [])
    raise ModelUnsupported(f"the tokenizer's decoder {kind!r} is not supported; supported are {_TAKEN}")


def _sentencepiece(steps: list[dict[str, Any]]) -> TokenDecoder:
    """Sequence[Replace …, ByteFallback?, Fuse?, Strip?]: in this order every step acts on one token alone."""
    replaced: list[tuple[str, str]] = []
    byte_fallback = fused = strips = False
    for step in steps:
        kind = step.get("type")
        if kind == "Replace" and isinstance(step["pattern"].get("String"), str) and not (byte_fallback or fused):
            replaced.append((step["pattern"]["String"], step["content"]))
        elif kind == "ByteFallback" and not fused:
            byte_fallback = True
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and (step["content"], step["start"], step["stop"]) == (" ", 1, 0):
            strips = True
        elif kind == "ByteLevel" and len(steps) == 1:
            return TokenDecoder(to_bytes=_byte_level, strips_first_space=False)
        else:
            raise ModelUnsupported(
                f"the tokenizer's decoder step {kind!r} is not supported in its place; supported are {_TAKEN}"
            )

    def to_bytes(token: str) -> bytes:
        for old, new in replaced:
            token = token.replace(old, new)
        match = _BYTE_TOKEN.fullmatch(token) if byte_fallback else None
        return bytes([int(match[1], 16)]) if match else token.encode()

    return TokenDecoder(to_bytes=to_bytes, strips_first_space=strips)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: the printable Latin-1 characters stand for their own byte, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
_CHARACTER_OF = {byte: character for character, byte in _BYTE_OF.items()}


def byte_level_text(data: bytes) -> str:
    """How a byte-level vocabulary writes a token of these bytes."""
    return "".join(_CHARACTER_OF[byte] for byte in data)


def _byte_level(token: str) -> bytes:
    """A token with any character outside the alphabet (an added token) stands for its own UTF-8."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()
