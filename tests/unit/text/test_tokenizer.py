"""Loading a model's tokenizer, encoding, and the special ids."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers

from fakes.tokenizers import byte_level, byte_level_folder, sentencepiece, sentencepiece_folder, write_folder
from minisgl_backend.errors import ModelUnsupported
from minisgl_backend.text.detokenizer import decode
from minisgl_backend.text.tokenizer import Tokenizer

TEXTS = ["a", "Say: the quick brown fox", "    four\n\tand a tab ", "你好 😀 가나", "é́ñ", "\x00\x7f", "<0x41>▁_"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_comes_back_from_its_tokens(tokenizer: Tokenizer, text: str) -> None:
    if tokenizer.strips_first_space and "▁" in text:
        text = text.replace("▁", "")  # SentencePiece itself can not tell this mark from a space
    ids = tokenizer.encode(text)
    assert decode(tokenizer, ids) == text


def test_the_table_holds_every_id_and_hides_the_special_ones(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.shown_bytes) == tokenizer.vocab_size
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert [tokenizer.shown_bytes[i] for i in (0, 1, 2)] == [b"", b"", b""]
    assert tokenizer.token_bytes(2) in (b"<|im_end|>", b"</s>")
    singles = {data for data in tokenizer.shown_bytes if len(data) == 1}
    assert len(singles) == 256


def test_no_text_has_fewer_tokens_than_its_bytes_over_the_longest_token(tokenizer: Tokenizer) -> None:
    for text in [*TEXTS, "▁" * 50, " " * 50, "the quick brown fox" * 5]:
        assert len(text.encode()) <= len(tokenizer.encode(text)) * tokenizer.max_token_bytes


def test_a_unicode_normaliser_widens_the_bound_on_bytes_per_token(tmp_path: Path) -> None:
    rust = byte_level()
    rust.normalizer = normalizers.NFC()
    plain, composed = (
        Tokenizer.load(byte_level_folder(tmp_path / "a")),
        Tokenizer.load(write_folder(tmp_path / "b", rust)),
    )
    assert composed.max_token_bytes == 4 * plain.max_token_bytes


def test_the_vocabulary_of_the_model_may_be_padded_beyond_the_tokenizers(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_level_folder(tmp_path, config={"vocab_size": 512}))
    assert tokenizer.vocab_size == 512
    assert decode(tokenizer, [511, *tokenizer.encode("the"), 400]) == "the"


def test_exactly_one_bos_stands_in_front(sentencepiece: Tokenizer) -> None:
    assert sentencepiece.encode("hi")[:2].count(1) == 1
    assert sentencepiece.encode("<s>hi") == sentencepiece.encode("hi")
    assert 1 not in sentencepiece.encode("hi", add_special_tokens=False)


def test_a_tokenizer_without_bos_adds_none(byte_level: Tokenizer) -> None:
    assert 1 not in byte_level.encode("hi")
    assert byte_level.encode("<|im_start|>hi")[0] == 1


def test_truncation_written_into_the_file_never_cuts_a_prompt(tmp_path: Path) -> None:
    rust = byte_level()
    rust.enable_truncation(4)
    rust.enable_padding(length=64)
    tokenizer = Tokenizer.load(write_folder(tmp_path, rust))
    assert decode(tokenizer, tokenizer.encode("QQQQQQQQQQ")) == "QQQQQQQQQQ"
    assert len(tokenizer.encode("QQQQQQQQQQ")) == 10


def test_a_named_token_is_special_even_when_the_file_forgot_it(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), tokenizer_config={"eos_token": "<|im_end|>"})
    file = json.loads((folder / "tokenizer.json").read_text())
    for token in file["added_tokens"]:
        token["special"] = False
    (folder / "tokenizer.json").write_text(json.dumps(file))
    assert Tokenizer.load(folder).special_token_ids == {2}


def test_a_folder_without_tokenizer_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match=r"tokenizer\.json is missing$"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelUnsupported, match=r"tokenizer\.model alone is not supported"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"decoder": 3}', b"\xff\xfe", b'{"model": {"type": "?"}}']
)
def test_a_broken_tokenizer_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelUnsupported, match="can not be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_broken_file_beside_the_tokenizer_is_named(tmp_path: Path, name: str) -> None:
    folder = byte_level_folder(tmp_path)
    (folder / name).write_bytes(b"[1]")
    with pytest.raises(ModelUnsupported, match=name):
        Tokenizer.load(folder)


@pytest.mark.parametrize("entry", ["2", 2.0, True, ["a"], {"id": 2}])
def test_an_eos_id_that_is_no_number_is_refused(tmp_path: Path, entry: Any) -> None:
    with pytest.raises(ModelUnsupported, match="eos_token_id"):
        Tokenizer.load(byte_level_folder(tmp_path, config={"eos_token_id": entry}))


@pytest.mark.parametrize(
    ("entry", "has_one"),
    [
        ([{"name": "tool_use", "template": "x"}, {"name": "default", "template": "{{ messages }}"}], True),
        ([{"name": "tool_use", "template": "x"}], False),
        ([{}, "default", 1, {"name": [1]}], False),
    ],
)
def test_of_several_templates_the_one_named_default_is_taken(entry: Any, has_one: bool, tmp_path: Path) -> None:
    sentencepiece_folder(tmp_path, tokenizer_config={"chat_template": entry})
    assert Tokenizer.load(tmp_path).has_chat_template is has_one


def test_a_vocabulary_that_no_memory_holds_is_refused(tmp_path: Path) -> None:
    sentencepiece_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 10**15}))
    with pytest.raises(ModelUnsupported, match="vocab_size must be at most 16777216"):
        Tokenizer.load(tmp_path)


def test_a_text_is_encoded_the_same_from_many_threads(tokenizer: Tokenizer) -> None:
    from concurrent.futures import ThreadPoolExecutor

    texts = [text * 50 for text in TEXTS] * 4
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == [tokenizer.encode(text) for text in texts]


def test_the_text_room_brings_neither_torch_nor_transformers(tmp_path: Path) -> None:
    sentencepiece_folder(tmp_path, chat_template="{{ messages }}")
    script = (
        "import sys; from pathlib import Path\n"
        "import minisgl_backend.text.record\n"
        "from minisgl_backend.text.tokenizer import Tokenizer\n"
        f"Tokenizer.load(Path({str(tmp_path)!r})).encode_chat([{{'role': 'user'}}])\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_two_kinds_are_what_they_claim() -> None:
    assert type(byte_level().decoder).__name__ == "ByteLevel"
    assert type(sentencepiece().decoder).__name__ == "Sequence"
