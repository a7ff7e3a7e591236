"""Tokens → text in pieces: the rules of the module, each by hand; property tests search further."""

from __future__ import annotations

from itertools import product

import pytest

from fakes.tokenizers import ids_of_bytes
from minisgl_backend.text.detokenizer import Detokenizer, decode, incomplete_tail
from minisgl_backend.text.tokenizer import Tokenizer


def pieces(tokenizer: Tokenizer, data: bytes, prompt: bytes = b"x") -> list[str]:
    """The piece after each byte, and the rest at the end."""
    detokenizer = Detokenizer(tokenizer, ids_of_bytes(tokenizer, prompt))
    return [*(detokenizer.push([i]) for i in ids_of_bytes(tokenizer, data)), detokenizer.finish()]


def test_a_character_comes_out_with_its_last_byte(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, "a😀é".encode()) == ["a", "", "", "", "😀", "", "é", ""]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\x80", ["\ufffd", ""]),
        (b"\xc0\xaf", ["\ufffd", "\ufffd", ""]),
        (b"\xe4A", ["", "\ufffdA", ""]),
        (b"\xf0\x80", ["", "\ufffd\ufffd", ""]),
        (b"\xed\xa0", ["", "\ufffd\ufffd", ""]),
        (b"\xf4\x90", ["", "\ufffd\ufffd", ""]),
        (b"\xf5", ["\ufffd", ""]),
        (b"\xf0\x9f\xf0\x9f", ["", "", "\ufffd", "", "\ufffd"]),
    ],
)
def test_a_byte_that_can_never_be_valid_is_replaced_at_once(
    tokenizer: Tokenizer, data: bytes, expected: list[str]
) -> None:
    assert pieces(tokenizer, data) == expected


def test_an_answer_cut_within_a_character_ends_with_one_replacement(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, b"ok\xf0\x9f\x98")[-1] == "\ufffd"
    assert decode(tokenizer, ids_of_bytes(tokenizer, b"ok\xf0\x9f\x98")) == "ok\ufffd"


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_that_began_in_the_prompt_does_not_leak(tokenizer: Tokenizer, cut: int) -> None:
    whole = "😀".encode()
    assert "".join(pieces(tokenizer, whole[cut:] + b"b", prompt=b"a" + whole[:cut])) == "b"
    assert "".join(pieces(tokenizer, b"b", prompt=b"a" + whole[:cut])) == "b"
    assert "".join(pieces(tokenizer, b"", prompt=b"a" + whole[:cut])) == ""


def test_a_wrong_byte_of_the_answer_shows_even_after_a_cut_prompt(tokenizer: Tokenizer) -> None:
    assert "".join(pieces(tokenizer, b"\x80b", prompt=b"a\xf0")) == "\ufffdb"


def test_special_tokens_are_not_shown_and_do_not_cut_a_character(tokenizer: Tokenizer) -> None:
    first, second = ids_of_bytes(tokenizer, "é".encode())
    detokenizer = Detokenizer(tokenizer, [1])
    assert [detokenizer.push([i]) for i in (2, first, 2, second, 0)] == ["", "", "", "é", ""]


def test_a_leading_space_is_kept_when_the_answer_continues_a_prompt(sentencepiece: Tokenizer) -> None:
    prompt = sentencepiece.encode("Say:")
    word = sentencepiece.encode("the", add_special_tokens=False)
    assert sentencepiece.token_bytes(word[0]).startswith(b" ")
    assert decode(sentencepiece, word, prompt) == " the"


def test_only_a_text_without_any_prompt_text_loses_its_first_space(sentencepiece: Tokenizer) -> None:
    word = sentencepiece.encode("the", add_special_tokens=False)
    assert decode(sentencepiece, word) == "the"
    assert decode(sentencepiece, word, [1]) == "the"
    assert decode(sentencepiece, [*word, *word], [1, 2]) == "the the"
    detokenizer = Detokenizer(sentencepiece, [1])
    assert [detokenizer.push([i]) for i in ids_of_bytes(sentencepiece, b"  a")] == ["", " ", "a"]


def test_a_token_costs_one_look_up_however_long_the_answer_is(byte_level: Tokenizer) -> None:
    class Counted(list[bytes]):
        reads = 0

        def __getitem__(self, place: int) -> bytes:  # type: ignore[override]
            Counted.reads += 1
            return super().__getitem__(place)

    detokenizer = Detokenizer(byte_level, [])
    detokenizer._table = Counted(byte_level.shown_bytes)
    for token in ids_of_bytes(byte_level, "a😀".encode() * 400):
        detokenizer.push([token])
        assert len(detokenizer._tail) <= 3
    assert Counted.reads == 2000


def test_an_incomplete_tail_is_exactly_what_further_bytes_can_complete() -> None:
    surrogates = range(0xD800, 0xE000)
    characters = [chr(code).encode() for code in range(0x80, 0x110000, 64) if code not in surrogates]
    beginnings = {character[:cut] for character in characters for cut in range(1, len(character))}
    edges = (0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC3, 0xE0)
    tried = [
        bytes([lead, *rest]) for length in (0, 1, 2) for lead in range(256) for rest in product(edges, repeat=length)
    ]
    for data in tried:
        longest = max((back for back in range(1, len(data) + 1) if data[-back:] in beginnings), default=0)
        assert incomplete_tail(data) == longest, data
        assert incomplete_tail(b"ab" + data) == longest, data
