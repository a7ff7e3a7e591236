"""Any tokens, cut anywhere: the pieces of a stream are the text, and what was sent is a prefix of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.tokenizers import byte_level_folder, ids_of_bytes, sentencepiece_folder
from minisgl_backend.text.detokenizer import Detokenizer, decode
from minisgl_backend.text.tokenizer import Tokenizer


@pytest.fixture(scope="module", params=[byte_level_folder, sentencepiece_folder])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(request.param(tmp_path_factory.mktemp("tokenizer")))


def stream(tokenizer: Tokenizer, ids: list[int], cuts: list[int], prompt: list[int]) -> list[str]:
    """The pieces for groups of the given sizes, the last group taking the rest, then the finish."""
    detokenizer = Detokenizer(tokenizer, prompt)
    pieces = []
    for size in cuts:
        pieces.append(detokenizer.push(ids[:size]))
        ids = ids[size:]
    return [*pieces, detokenizer.push(ids), detokenizer.finish()]


cuts = st.lists(st.integers(0, 5), max_size=40)
any_ids = st.lists(st.integers(0, 383), max_size=60)  # both vocabularies have at least 384 ids
texts = st.text(max_size=40) | st.text(alphabet="a é😀가\u200d👩‍👧\n\t▁", max_size=40)


@given(ids=any_ids, prompt=any_ids, cuts=cuts)
def test_any_tokens_cut_anywhere_give_the_same_text(
    tokenizer: Tokenizer, ids: list[int], prompt: list[int], cuts: list[int]
) -> None:
    assert "".join(stream(tokenizer, ids, cuts, prompt)) == decode(tokenizer, ids, prompt)


@given(data=st.binary(max_size=60), cuts=cuts)
def test_any_bytes_read_as_python_reads_them(tokenizer: Tokenizer, data: bytes, cuts: list[int]) -> None:
    pieces = stream(tokenizer, ids_of_bytes(tokenizer, data), cuts, ids_of_bytes(tokenizer, b"x"))
    assert "".join(pieces) == data.decode("utf-8", "replace")


@given(text=texts, more=texts, cuts=cuts)
def test_valid_text_never_shows_a_replacement_it_does_not_hold(
    tokenizer: Tokenizer, text: str, more: str, cuts: list[int]
) -> None:
    text = text.replace("\ufffd", "")
    pieces = stream(tokenizer, ids_of_bytes(tokenizer, text.encode()), cuts, ids_of_bytes(tokenizer, more.encode()))
    assert not any("\ufffd" in piece for piece in pieces)


@given(prompt=st.binary(max_size=8), answer=st.binary(max_size=8))
def test_an_answer_is_what_the_whole_has_beyond_the_prompt(tokenizer: Tokenizer, prompt: bytes, answer: bytes) -> None:
    prompt = b"x" + prompt
    expected = (prompt + answer).decode("utf-8", "replace")[len(prompt.decode("utf-8", "replace")) :]
    assert decode(tokenizer, ids_of_bytes(tokenizer, answer), ids_of_bytes(tokenizer, prompt)) == expected


@given(ids=any_ids)
def test_byte_level_tokens_read_as_the_tokenizers_package_reads_them(tokenizer: Tokenizer, ids: list[int]) -> None:
    if tokenizer.strips_first_space:
        return  # byte fallback differs on purpose where a run of bytes is wrong: see the module's docstring
    assert decode(tokenizer, ids) == tokenizer._rust.decode(ids, skip_special_tokens=True)


@given(before=texts.filter(bool), answer=texts)
def test_a_tokenised_text_continues_its_prompt_as_the_tokenizers_package_says(
    tokenizer: Tokenizer, before: str, answer: str
) -> None:
    prompt, ids = tokenizer.encode(before), tokenizer.encode(answer, add_special_tokens=False)
    read = tokenizer._rust.decode
    assert decode(tokenizer, ids, prompt) == read(prompt + ids)[len(read(prompt)) :]
