"""The vocabulary of a GGUF file as a tokenizer.json: words by the pre-tokenizer's name, SentencePiece by scores."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from fakes.llama_cpp import tiny_vocabulary
from minisgl_backend.errors import ModelUnsupported
from minisgl_backend.models.gguf_config import plain, token_ids
from minisgl_backend.models.gguf_tokenizer import tokenizer_json

TOKENS, MERGES = tiny_vocabulary()

PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"theandox 123".replace(" ", "")]
PIECES += ["▁t", "he", "an", "▁the", "and", "▁and", "th", "the", "▁▁", "▁▁▁▁", "ox", "hea", "12", "<tool>"]


def byte_level(**changes: Any) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(TOKENS) - 3),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


def sentencepiece(**changes: Any) -> dict[str, Any]:
    """The later a piece, the lower its score, as in every trained vocabulary."""
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": PIECES,
        "tokenizer.ggml.scores": [-float(i) for i in range(len(PIECES))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(PIECES) - 260) + [4],
        "tokenizer.ggml.bos_token_id": 1,
    } | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


def built(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_json(metadata, "tiny.gguf"))


def words(pre: str, text: str) -> list[str]:
    tokenizer = built(byte_level(pre=pre))
    return [text[begin:end] for _, (begin, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


TEXT = "I'LL pay 12345 euros,\n\n  isn't fooBar it?!\n x"


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", "I ' LL| pay| 12345| euros|,|\n\n | isn|'t| fooBar| it|?!|\n| x"),
        ("smollm", "I ' LL| pay| |1|2|3|4|5| euros|,|\n\n | isn|'t| fooBar| it|?!|\n| x"),
        ("llama-bpe", "I|'LL| pay| |123|45| euros|,\n\n| | isn|'t| fooBar| it|?!\n| x"),
        ("dbrx", "I|'LL| pay| |123|45| euros|,\n\n| | isn|'t| fooBar| it|?!\n| x"),
        ("qwen2", "I|'LL| pay| |1|2|3|4|5| euros|,\n\n| | isn|'t| fooBar| it|?!\n| x"),
        ("tekken", "I|'LL| pay| |1|2|3|4|5| euros|,\n\n| | isn|'t| foo|Bar| it|?!\n| x"),
        ("gpt-4o", "I'LL| pay| |123|45| euros|,\n\n| | isn't| foo|Bar| it|?!\n| x"),
    ],
)
def test_a_text_falls_into_the_words_of_its_pre_tokenizer(pre: str, expected: str) -> None:
    assert words(pre, TEXT) == expected.replace("I ' LL", "I|'|LL").split("|")


def test_a_word_that_is_a_token_is_that_token_only_where_the_name_says_so() -> None:
    whole = [*TOKENS, "Ġand"]
    types = [3, 3, 3] + [1] * (len(whole) - 3)
    alone = built(byte_level(pre="llama-bpe", tokens=whole, token_type=types, add_bos_token=False))
    merged = built(byte_level(pre="qwen2", tokens=whole, token_type=types))
    assert alone.encode(" and").tokens == ["Ġand"] and merged.encode(" and").tokens == ["Ġ", "a", "n", "d"]


@pytest.mark.parametrize(
    ("metadata", "first"),
    [
        (byte_level(), []),
        (byte_level(add_bos_token=True), [1]),
        (byte_level(pre="llama-bpe"), [1]),
        (byte_level(pre="llama-bpe", add_bos_token=False), []),
        (sentencepiece(), [1]),
        (sentencepiece(add_bos_token=False), []),
    ],
)
def test_a_text_begins_with_the_first_token_by_the_file_and_else_by_its_kind(
    metadata: dict[str, Any], first: list[int]
) -> None:
    tokenizer = built(metadata)
    alone = tokenizer.encode("the", add_special_tokens=False).ids
    assert tokenizer.encode("the").ids == first + alone


def plain_encode(text: str, prefix: bool) -> list[int]:
    """SentencePiece's rule, written down plainly: of all neighbours those join whose piece has the highest score."""
    text = ("▁" if prefix and text else "") + text.replace(" ", "▁")
    id_of = {piece: i for i, piece in enumerate(PIECES[:-1]) if i > 258}
    pieces = list(text)
    while True:
        joined = [(id_of[pair], at) for at in range(len(pieces) - 1) if (pair := pieces[at] + pieces[at + 1]) in id_of]
        if not joined:
            break
        _, at = min(joined)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return [i for piece in pieces for i in ([id_of[piece]] if piece in id_of else [3 + b for b in piece.encode()])]


BY_PREFIX = {prefix: built(sentencepiece(add_space_prefix=prefix)) for prefix in (False, True)}


@given(st.text(alphabet="theandox 12é😀", max_size=24), st.booleans())
def test_scores_join_pieces_as_sentencepiece_joins_them_and_the_rest_are_bytes(text: str, prefix: bool) -> None:
    tokenizer = BY_PREFIX[prefix]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == plain_encode(text, prefix)
    assert tokenizer.decode(ids) == text


def test_control_and_user_defined_tokens_are_cut_out_first_and_only_control_ones_are_special() -> None:
    tokenizer = built(sentencepiece())
    assert tokenizer.encode("</s>", add_special_tokens=False).ids == [2]
    assert PIECES.index("<tool>") in tokenizer.encode("and<tool>", add_special_tokens=False).ids
    special = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    assert special == {"<s>": True, "</s>": True, "<tool>": False}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (byte_level(pre="falcon"), r"pre 'falcon' is not supported; gpt-2, olmo"),
        ({k: v for k, v in byte_level().items() if k != "tokenizer.ggml.pre"}, "pre None is not supported"),
        (byte_level(model="bert"), r"model 'bert' is not supported; gpt2 and llama are"),
        (byte_level(tokens=[]), "holds no vocabulary"),
        (byte_level(token_type=[1]), "1 entries for"),
        (byte_level(merges=["a b c"]), "pairs of tokens"),
        (byte_level(add_bos_token=True, bos_token_id=10**6), "must be a token's id"),
        (sentencepiece(scores=[0.0]), "a number for each"),
    ],
)
def test_a_vocabulary_that_is_not_read_is_named(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelUnsupported, match=rf"tiny\.gguf.*{message}"):
        tokenizer_json(metadata, "tiny.gguf")


def ends(tokens: Sequence[str], types: Sequence[int], **ids: int) -> Any:
    metadata = {f"tokenizer.ggml.{name}": value for name, value in ids.items()}
    made = token_ids({"tokenizer.ggml.tokens": list(tokens), "tokenizer.ggml.token_type": list(types), **metadata})
    return json.loads(json.dumps(made)).get("eos_token_id")


def test_an_answer_ends_at_every_token_that_the_file_names_and_at_the_end_of_a_turn() -> None:
    assert ends(["a", "</s>"], [1, 3], eos_token_id=1) == 1
    assert ends(["a", "</s>", "b"], [1, 3, 3], eos_token_id=1, eot_token_id=2) == [1, 2]
    assert ends(["<eos>", "<end_of_turn>"], [3, 4], eos_token_id=0) == [0, 1]
    assert ends(["<eos>", "<|end|>"], [3, 1], eos_token_id=0) == 0, "a plain piece of that text is no end"
    assert ends(["a"], [1]) is None


@pytest.mark.parametrize("written", [1e-05, 1e-06, 10000.0, 500000.0, 0.1, 8.0, 1.0000001192092896])
def test_a_float_of_32_bits_is_what_was_written(written: float) -> None:
    import struct

    stored = struct.unpack("<f", struct.pack("<f", written))[0]
    assert struct.pack("<f", plain(stored)) == struct.pack("<f", written)
    assert len(repr(plain(stored))) <= len(repr(stored))
    assert plain(7) == 7 and plain("x") == "x"
