"""A folder that holds a tekken.json and no tokenizer.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakes.tekken import write_small
from minisgl_backend.errors import ModelUnsupported
from minisgl_backend.text.tokenizer import Tokenizer

TOKENS = [b"ab", b"bc", b"abc", b" a"]


def test_neighbours_join_by_the_rank_of_what_they_make(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_small(tmp_path, TOKENS))
    ranks = {"abc": [258], "bca": [257, 97], "abcab": [258, 256], " a": [259], "xab": [120, 256]}
    for text, expected in ranks.items():
        assert tokenizer.encode(text, add_special_tokens=False) == [3 + rank for rank in expected], text


def test_special_tokens_come_first_and_bos_stands_in_front(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_small(tmp_path, TOKENS, specials=12))
    assert tokenizer.encode("x") == [1, 12 + 120]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert tokenizer.special_token_ids == frozenset(range(12))
    assert tokenizer.token_bytes(9) == b"[TOOL_CALLS]"
    assert tokenizer.encode("[TOOL_CALLS]", add_special_tokens=False) == [9]


def test_a_file_may_name_its_special_tokens(tmp_path: Path) -> None:
    named = [{"rank": 0, "token_str": "<unk>"}, {"rank": 1, "token_str": "<s>"}, {"rank": 2, "token_str": "</s>"}]
    folder = write_small(tmp_path, TOKENS, specials=5, special_tokens=[*named, {"rank": 3, "token_str": "[X]"}])
    tokenizer = Tokenizer.load(folder)
    assert [tokenizer.token_bytes(i) for i in (3, 4)] == [b"[X]", b"<SPECIAL_4>"]


@pytest.mark.parametrize(
    ("tokens", "changes", "says"),
    [
        (TOKENS, {"vocab": []}, "names 260 tokens and has 0"),
        (TOKENS, {"vocab": [{"rank": 0}]}, "can not be read as a tekken file"),
        (TOKENS, {"config": {}}, "can not be read as a tekken file"),
        ([b"<s>"], {}, "is both a special token and another one"),
        (TOKENS, {"special_tokens": [{"rank": 0, "token_str": "a1"}]}, "has no <s>"),
    ],
)
def test_what_is_no_tekken_file_is_refused_by_name(
    tmp_path: Path, tokens: list[bytes], changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ModelUnsupported, match=rf"tekken\.json.*{says}"):
        Tokenizer.load(write_small(tmp_path, tokens, **changes))
