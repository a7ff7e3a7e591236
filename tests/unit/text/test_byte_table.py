"""The decoder of a tokenizer.json as a rule for one token."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import decoders

from minisgl_backend.errors import ModelUnsupported
from minisgl_backend.text.byte_table import token_decoder


def spec_of(decoder: Any) -> dict[str, Any]:
    spec: dict[str, Any] = json.loads(decoder.__getstate__())
    return spec


LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]


def test_every_byte_has_its_character_in_the_byte_level_alphabet() -> None:
    from tokenizers import pre_tokenizers

    decode = token_decoder(spec_of(decoders.ByteLevel())).to_bytes
    assert {decode(character) for character in pre_tokenizers.ByteLevel.alphabet()} == {bytes([b]) for b in range(256)}
    assert decode("Ġthe") == b" the"


def test_an_added_token_outside_the_byte_alphabet_stands_for_its_own_text() -> None:
    decode = token_decoder(spec_of(decoders.ByteLevel())).to_bytes
    assert decode("<｜end▁of▁text｜>") == "<｜end▁of▁text｜>".encode()
    assert decode("two words") == b"two words"


def test_sentencepiece_marks_are_spaces_and_byte_tokens_are_bytes() -> None:
    decoder = token_decoder(spec_of(decoders.Sequence(LLAMA)))
    assert decoder.strips_first_space
    assert [decoder.to_bytes(t) for t in ("▁the", "▁▁", "<0xF0>", "<0x0a>", "<0xG0>")] == [
        b" the",
        b"  ",
        b"\xf0",
        b"\n",
        b"<0xG0>",
    ]


def test_a_sentencepiece_decoder_without_strip_keeps_the_first_space() -> None:
    assert not token_decoder(spec_of(decoders.Sequence(LLAMA[:3]))).strips_first_space


def test_byte_tokens_are_plain_text_where_the_decoder_has_no_byte_fallback() -> None:
    decoder = token_decoder(spec_of(decoders.Sequence([LLAMA[0], LLAMA[2]])))
    assert decoder.to_bytes("<0x41>") == b"<0x41>"


def test_metaspace_is_read_with_its_own_mark() -> None:
    assert token_decoder(spec_of(decoders.Metaspace("_"))).to_bytes("_a") == b" a"
    assert token_decoder(spec_of(decoders.Metaspace())).strips_first_space
    assert not token_decoder(spec_of(decoders.Metaspace(prepend_scheme="never"))).strips_first_space


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.CTC(), "CTC"),
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " ")]), "Replace"),
        (decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]), "Strip"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]), "Strip"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]), "ByteLevel"),
    ],
)
def test_a_decoder_whose_tokens_have_no_bytes_of_their_own_is_refused_by_name(decoder: Any, named: str) -> None:
    with pytest.raises(ModelUnsupported, match=named):
        token_decoder(spec_of(decoder))


def test_a_missing_decoder_is_refused() -> None:
    with pytest.raises(ModelUnsupported, match="no decoder"):
        token_decoder(None)
