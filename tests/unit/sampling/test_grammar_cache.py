"""Which compiled grammars a worker keeps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fakes.tokenizers import byte_level_folder
from minisgl_backend.sampling.grammar_cache import GrammarCache
from minisgl_backend.sampling.grammar_library import load_grammar_library
from minisgl_backend.text.tokenizer import Tokenizer


@dataclass
class Compiled:
    """What the cache asks of the library's own."""

    size: int

    def memory_size_bytes(self) -> int:
        return self.size


def kept(cache: GrammarCache, keys: str) -> str:
    """Asks without using them."""
    return "".join(key for key in keys if key.encode() in cache._compiled)


def test_the_longest_unused_go_when_there_are_too_many() -> None:
    cache = GrammarCache(most=2, most_bytes=100)
    for key in (b"a", b"b"):
        cache.put(key, Compiled(1))
    assert cache.get(b"a") is not None
    cache.put(b"c", Compiled(1))
    assert kept(cache, "abc") == "ac"
    assert cache.get(b"b") is None


def test_they_go_too_when_the_others_have_grown_since_they_came() -> None:
    cache = GrammarCache(most=10, most_bytes=100)
    compiled = {key: Compiled(20) for key in "abcd"}
    for key, own in compiled.items():
        cache.put(key.encode(), own)
    assert kept(cache, "abcd") == "abcd"
    compiled["c"].size = 70
    assert cache.get(b"d") is compiled["d"]
    assert kept(cache, "abcd") == "cd"


def test_one_that_is_larger_than_all_may_be_stays_while_it_is_used() -> None:
    cache = GrammarCache(most=10, most_bytes=100)
    cache.put(b"a", Compiled(500))
    assert cache.get(b"a") is not None
    cache.put(b"b", Compiled(1))
    assert kept(cache, "ab") == "b"


def test_the_librarys_own_grow_as_masks_are_computed(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_level_folder(tmp_path))
    library = load_grammar_library()
    compiler = library.compiler(library.vocabulary(tokenizer.shown_bytes), lazy=True)
    compiled = library.compile(compiler, library.from_regex("([a-f]|[b-g]x|[^a-y]z)*"))
    before = compiled.memory_size_bytes()
    library.matcher(compiled, [2]).fill_next_token_bitmask(
        np.zeros((1, -(-len(tokenizer.shown_bytes) // 32)), np.int32), 0, False
    )
    assert compiled.memory_size_bytes() > before
