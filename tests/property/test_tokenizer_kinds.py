"""Three kinds of tokenizer, text in many scripts, random bytes, cut anywhere: the pieces are the text, byte for byte.

`make fuzz` runs ten thousand streams of each kind.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import mistral_common
import pytest
import tiktoken

from fakes.scripts import TEXTS
from fakes.tekken import reference
from fakes.tokenizers import byte_ids, byte_level_folder, sentencepiece_folder
from minisgl_backend.text.detokenizer import Detokenizer, decode
from minisgl_backend.text.tokenizer import Tokenizer

TEKKEN = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
STREAMS = int(os.environ.get("MINISGL_FUZZ_STREAMS", "300"))

pytestmark = pytest.mark.slow


def tekken_folder(folder: Path) -> Path:
    """Mistral's own vocabulary, alone in its folder."""
    (folder / "tekken.json").symlink_to(TEKKEN)
    return folder


@pytest.fixture(scope="module", params=[byte_level_folder, sentencepiece_folder, tekken_folder])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    make: Callable[[Path], Path] = request.param
    return Tokenizer.load(make(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def ids_of(tokenizer: Tokenizer) -> Callable[[bytes], list[int]]:
    """Bytes → a token for each."""
    ids = byte_ids(tokenizer)
    return lambda data: [ids[byte] for byte in data]


def pieces_of(tokenizer: Tokenizer, ids: list[int], prompt: list[int], draw: random.Random) -> list[str]:
    """What a stream shows when its tokens come in groups of random sizes."""
    detokenizer = Detokenizer(tokenizer, prompt)
    pieces: list[str] = []
    while ids:
        size = draw.choice((1, 1, 1, 2, 5))
        pieces.append(detokenizer.push(ids[:size]))
        ids = ids[size:]
    return [*pieces, detokenizer.finish()]


def some_text(draw: random.Random) -> str:
    """Parts of texts, cut anywhere between characters, the joiners of emoji among them."""
    parts = []
    for _ in range(draw.randint(1, 4)):
        text = draw.choice(TEXTS)
        start = draw.randrange(len(text))
        parts.append(text[start : start + draw.randint(1, 30)])
    return "".join(parts)


def test_every_script_comes_back_whole_in_any_pieces(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("x")
    for number, text in enumerate(TEXTS):
        ids = tokenizer.encode(text, add_special_tokens=False)
        pieces = pieces_of(tokenizer, ids, prompt, random.Random(number))
        expected = f" {text}" if tokenizer.strips_first_space else text  # SentencePiece begins a text with a space
        assert "".join(pieces) == expected
        assert not any("\ufffd" in piece for piece in pieces)


def test_random_streams_of_text_are_their_text(tokenizer: Tokenizer) -> None:
    draw = random.Random(1)
    for _ in range(STREAMS):
        text = some_text(draw)
        ids = tokenizer.encode(text, add_special_tokens=False)
        pieces = pieces_of(tokenizer, ids, tokenizer.encode("x"), draw)
        assert "".join(pieces).removeprefix(" " * tokenizer.strips_first_space) == text
        assert not any("\ufffd" in piece for piece in pieces)


def test_random_bytes_read_as_python_reads_them(tokenizer: Tokenizer, ids_of: Callable[[bytes], list[int]]) -> None:
    draw = random.Random(2)
    for _ in range(STREAMS):
        data = draw.randbytes(draw.randint(1, 40))
        pieces = pieces_of(tokenizer, ids_of(data), ids_of(b"x"), draw)
        assert "".join(pieces) == data.decode("utf-8", "replace")


def test_any_tokens_of_the_vocabulary_in_any_pieces_are_the_whole(tokenizer: Tokenizer) -> None:
    draw = random.Random(3)
    for _ in range(STREAMS):
        ids, prompt = (
            [draw.randrange(tokenizer.vocab_size) for _ in range(draw.randint(0, 30))] for _ in ("answer", "prompt")
        )
        assert "".join(pieces_of(tokenizer, ids, prompt, draw)) == decode(tokenizer, ids, prompt)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_what_can_never_become_a_character_is_shown_at_once_and_once(
    tokenizer: Tokenizer, ids_of: Callable[[bytes], list[int]], size: int
) -> None:
    for data, shown in ((b"\x80", "\ufffd"), (b"\xc3\x28", "\ufffd("), (b"\xf5", "\ufffd"), (b"\xe2\x28", "\ufffd(")):
        detokenizer, ids = Detokenizer(tokenizer, ids_of(b"x")), ids_of(data)
        assert "".join(detokenizer.push(ids[at : at + size]) for at in range(0, len(ids), size)) == shown
        assert detokenizer.finish() == ""


def test_a_tekken_file_tokenises_as_tiktoken_does(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tekken_folder(tmp_path))
    config, ranks = reference(json.loads(TEKKEN.read_text(encoding="utf-8")))
    theirs = tiktoken.Encoding("tekken", pat_str=config["pattern"], mergeable_ranks=ranks, special_tokens={})
    draw = random.Random(4)
    for text in [*TEXTS, *(some_text(draw) for _ in range(STREAMS)), "a" * 99, " " * 99]:
        expected = [config["default_num_special_tokens"] + rank for rank in theirs.encode_ordinary(text)]
        assert tokenizer.encode(text, add_special_tokens=False) == expected
    assert tokenizer.encode("hi")[0] == tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.token_bytes(9) == b"[TOOL_CALLS]"
