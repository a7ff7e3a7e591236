"""One grammar: compiled, tried out, and written down for the workers. Runs in a child of the nursery.

Where it stands in the flow: `nursery.py`. Compiling computes a mask for every state of the grammar's automaton, which
is what costs; it is done here to see that it can be done at all. The workers are sent the grammar itself and compute
the masks they come by: a whole compiled grammar is a hundred times as large, and reading it costs more than compiling.
What compiles within the limits of this process costs a worker less than that, spread over the tokens of an answer.
"""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minisgl_backend.sampling.grammar_library import load_grammar_library
from minisgl_backend.text.structured.spec import GrammarSpec

MAX_MASK_BYTES = 8 << 20  # all masks of one grammar, which a worker keeps
MAX_COMPILED_BYTES = 1 << 20  # what travels with each request, and with each plan that admits some of its answers
MAX_TOKEN_S = 0.05  # of one token of an answer, of this process's time, with all masks computed
_TRIED_TOKENS = 128
_END = 0  # of a trial: which id stands for the end is of no consequence

_LOOSE = '[^\\"\\\\\\r\\n]'
_EXACT = '[^\\0-\\x1f\\"\\\\]'
"""The library's set of characters for strings of bounded length lets control characters through, which JSON forbids."""


class GrammarFault(Exception):
    """What is wrong with a grammar: a clause that follows its name."""


class Compiler:
    """Loads the library, and the vocabulary: of every id what it adds to the text."""

    def __init__(self, token_bytes: Sequence[bytes], clock: Callable[[], float] = time.process_time) -> None:
        """clock: CPU seconds of this process."""
        self._clock = clock
        self._token_bytes = token_bytes
        self._library = load_grammar_library(without_torch=True)
        self._compiler = self._library.compiler(self._library.vocabulary(token_bytes), lazy=False)

    def compiled(self, spec: GrammarSpec) -> bytes:
        """Grammar.compiled. Raises GrammarFault, and the library's RuntimeError for what it can not read."""
        grammar = self._grammar(spec)
        compiled = self._library.compile(self._compiler, grammar)
        if compiled.memory_size_bytes() > MAX_MASK_BYTES:
            raise GrammarFault(f"needs more than {MAX_MASK_BYTES >> 20} MiB when compiled")
        self._try_out(compiled)
        written = zlib.compress(self._library.dump(grammar), 1)
        if len(written) > MAX_COMPILED_BYTES:
            raise GrammarFault(f"needs more than {MAX_COMPILED_BYTES >> 20} MiB when written down")
        return written

    def _grammar(self, spec: GrammarSpec) -> Any:
        match spec.kind:
            case "regex":
                return self._library.from_regex(spec.source)
            case "ebnf":
                return self._library.from_ebnf(spec.source)
            case "tag":
                grammar = self._library.from_structural_tag(spec.source)
            case _:
                grammar = self._library.from_schema(spec.source)
        text = str(grammar.to_string())
        return self._library.from_ebnf(text.replace(_LOOSE, _EXACT)) if _LOOSE in text else grammar

    def _try_out(self, compiled: Any) -> None:
        """A short walk: it finds grammars that lead nowhere at once, or that take long with every token."""
        matcher = self._library.matcher(compiled, [_END])
        bits = np.zeros((1, -(-len(self._token_bytes) // 32)), np.int32)
        draw = random.Random(0)
        for place in range(_TRIED_TOKENS):
            began_s = self._clock()
            matcher.fill_next_token_bitmask(bits, 0, False)
            tokens = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[: len(self._token_bytes)])
            if not len(tokens):
                raise GrammarFault("can not be met: it leads to where nothing may follow")
            going_on = tokens[tokens != _END]  # an end is no token that could take long
            if not len(going_on) or not matcher.accept_token(int(going_on[draw.randrange(len(going_on))]), False):
                return
            if place and self._clock() - began_s > MAX_TOKEN_S:
                raise GrammarFault(f"takes more than {MAX_TOKEN_S * 1e3:g} ms for a token")
