"""The worker's side of forms: which rows get a mask, what reaches a matcher, and what it costs rows without one."""

from __future__ import annotations

import itertools
import zlib
from pathlib import Path

import numpy as np
import pytest

from fakes.tokenizers import byte_level_folder
from minisgl_backend.messages.ids import SlotId
from minisgl_backend.messages.plan import Admission
from minisgl_backend.messages.sampling import GREEDY, Grammar, Sampling
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.sampling.grammar import GrammarSlots
from minisgl_backend.sampling.grammar_library import load_grammar_library
from minisgl_backend.sampling.utf8 import WHOLE, Utf8Masks, after
from minisgl_backend.sampling.white_space import MAX_WHITE_SPACE, JsonSpace
from minisgl_backend.text.tokenizer import Tokenizer


def bits_set(bits: np.ndarray, vocab: int) -> list[int]:
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:vocab]).tolist()


def test_rows_without_a_grammar_start_nothing_and_load_nothing() -> None:
    def never() -> list[bytes]:
        raise AssertionError("the vocabulary is not needed")

    slots = GrammarSlots(never, 100)
    try:
        rows = np.arange(64)
        slots.admit([Admission(SlotId(slot), pack_tokens([1]), GREEDY) for slot in range(64)])
        assert slots.begin(rows) is None
        slots.drew(rows, [5] * 64)
        assert slots.begin(rows) is None
    finally:
        slots.close()


def test_a_form_that_costs_the_others_too_much_ends_alone(tmp_path: Path) -> None:
    """A second of CPU time for each token of the first row, none for those of the second."""
    tokenizer = Tokenizer.load(byte_level_folder(tmp_path))
    library = load_grammar_library()
    compiled = zlib.compress(library.dump(library.from_regex("[a-z]*")))
    dear, cheap = (Grammar(key, compiled, pack_tokens([2])) for key in (b"dear", b"cheap"))
    asked = itertools.count()

    def clock() -> float:
        """Of four readings two belong to each row."""
        reading = next(asked)
        return reading // 4 + (0.0, 1.0, 1.0, 1.0)[reading % 4]

    slots = GrammarSlots(lambda: tokenizer.shown_bytes, tokenizer.vocab_size, clock)
    try:
        sampling = [Sampling(0.0, 0, 1.0, 0, 0, grammar=grammar) for grammar in (dear, cheap)]
        slots.admit([Admission(SlotId(i), pack_tokens([1]), own) for i, own in enumerate(sampling)])
        letter = tokenizer.encode("a", add_special_tokens=False)
        open_rows = []
        for _ in range(6):
            filling = slots.begin(np.arange(2))
            assert filling is not None
            open_rows.append([bool(row.any()) for row in filling.result().bits])
            slots.drew(np.arange(2), letter * 2)
    finally:
        slots.close()
    assert open_rows == [[True, True]] * 3 + [[False, True]] * 3


def test_admissions_of_a_plan_that_share_a_grammar_are_told_it_once(tmp_path: Path) -> None:
    """In the next plan, which says it again, and of a slot that begins anew with another one, too."""
    tokenizer = Tokenizer.load(byte_level_folder(tmp_path))
    library = load_grammar_library()
    (letter,), (digit,) = (tokenizer.encode(text, add_special_tokens=False) for text in "a1")
    forms = {
        key: Grammar(key, zlib.compress(library.dump(library.from_regex(pattern))), pack_tokens([2]))
        for key, pattern in ((b"letters", "[a-z]+"), (b"digits", "[0-9]+"))
    }
    slots = GrammarSlots(lambda: tokenizer.shown_bytes, tokenizer.vocab_size)

    def admit(*keys: bytes) -> list[tuple[bool, bool]]:
        """Of each slot whether a letter and whether a digit may be drawn first."""
        told: dict[bytes, Grammar] = {}
        admissions = []
        for slot, key in enumerate(keys):
            grammar = Grammar(key, b"", forms[key].end_ids) if key in told else forms[key]
            told[key] = grammar
            admissions.append(Admission(SlotId(slot), pack_tokens([1]), Sampling(0.0, 0, 1.0, 0, 0, grammar=grammar)))
        slots.admit(admissions)
        filling = slots.begin(np.arange(len(keys)))
        assert filling is not None
        rows = [bits_set(row.numpy(), tokenizer.vocab_size) for row in filling.result().bits]
        return [(letter in row, digit in row) for row in rows]

    try:
        letters, digits = (True, False), (False, True)
        assert admit(b"letters", b"letters", b"digits", b"letters") == [letters, letters, digits, letters]
        assert admit(b"digits", b"digits", b"letters", b"digits") == [digits, digits, letters, digits]
    finally:
        slots.close()


@pytest.mark.parametrize(
    ("data", "valid"),
    [
        (b"a", True),
        ("é日😀\U0010ffff".encode(), True),
        (b"\xe0\x80\x80", False),
        (b"\xed\xa0\x80", False),
        (b"\xf0\x80\x80\x80", False),
        (b"\xf4\x90\x80\x80", False),
        (b"\xc0\x80", False),
        (b"\x80", False),
        (b"\xf5", False),
    ],
)
def test_utf8_is_what_python_reads(data: bytes, valid: bool) -> None:
    assert (after(WHOLE, data) == WHOLE) is valid


def test_every_pair_and_triple_of_bytes_is_judged_as_python_does() -> None:
    edges = [0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC2, 0xDF, 0xE0, 0xE1, 0xED, 0xEF, 0xF0, 0xF4, 0xF5]
    for first in range(256):
        for second in edges:
            for third in edges:
                data = bytes([first, second, third])
                try:
                    data.decode()
                    expected = True
                except UnicodeDecodeError:
                    expected = False
                assert (after(WHOLE, data) == WHOLE) is expected, data


def test_a_mask_lets_only_the_rest_of_a_begun_character_through() -> None:
    vocabulary = [b"a", b"\xe0", b"\x80", b"\xa0\x80", b"\xa0\x80z", b"", b"\xff"]
    masks = Utf8Masks(vocabulary)
    state = masks.step(WHOLE, 1)
    bits = np.full(1, -1, np.int32)
    masks.lay_over(state, bits)
    assert bits_set(bits, len(vocabulary)) == [3, 4]
    assert masks.step(state, 3) == WHOLE


def test_white_space_is_counted_outside_strings_alone() -> None:
    vocabulary = [b" ", b'"', b"\\", b"a", b"  b"]
    space = JsonSpace(vocabulary)
    state = 0
    for token in (1, *[0] * 50, 2, 1, 0, 1):
        state = space.step(state, token)
    assert state == 0
    for _ in range(MAX_WHITE_SPACE):
        state = space.step(state, 0)
    bits = np.full(1, -1, np.int32)
    space.lay_over(state, bits)
    assert bits_set(bits, len(vocabulary)) == [1, 2, 3]
