"""Grammars of the running sequences: which tokens may follow, filled in while the forward runs.

Where it stands in the flow, beside rank 0's sampler:

    admit (new life, or again after a retraction) ──► per slot: a matcher, and the outputs it has not seen
    begin (forward runs) ── one thread ── accept what was drawn last, fill the masks ──► masks (draw.py) ──► drew

Each token reaches its matcher exactly once and in order: the one of step N when step N + 1 fills its masks, the ones
from before a retraction when the slot is admitted again. All of it happens on one thread, which the library's calls
leave free of the GIL. Nothing here raises: a grammar that can not be read and a matcher that refuses a token give a
mask without a bit, and so their sequence fails alone. So does one whose form costs the others too much time.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch

from minisgl_backend.messages.plan import NO_TOKEN, Admission
from minisgl_backend.messages.sampling import Grammar
from minisgl_backend.messages.tokens import unpack_tokens
from minisgl_backend.sampling.grammar_cache import GrammarCache
from minisgl_backend.sampling.grammar_library import GrammarLibrary, load_grammar_library
from minisgl_backend.sampling.masks import Rows, TokenMasks
from minisgl_backend.sampling.utf8 import WHOLE, Bits, Utf8Masks
from minisgl_backend.sampling.white_space import BETWEEN, JsonSpace

FREE_TOKEN_S = 0.02
"""CPU time that a token of an answer may take here for nothing: a form that means well takes a hundredth of it."""

BUDGET_S = 3.0
"""What an answer may take beyond that; more than all masks of the largest form that is let in. Everybody's step waits
for these, and the costs of an ambiguous form grow with its answer, along ways that no trial can all go before."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Slot:
    """One life of a slot that has a grammar."""

    grammar: Grammar
    ends: tuple[int, ...]
    unseen: list[int] = field(default_factory=list)  # outputs its matcher has not been told yet
    matcher: Any = None
    broken: bool = False
    over: bool = False  # an end was drawn: what a step planned ahead draws is dropped
    spent_s: float = 0.0  # of BUDGET_S
    utf8: int = WHOLE
    space: int = BETWEEN


@dataclass(frozen=True, slots=True)
class _Tools:
    """What is built once of the vocabulary."""

    library: GrammarLibrary
    compiler: Any
    utf8: Utf8Masks
    space: JsonSpace


class GrammarSlots:
    """Owns the matchers of all slots. Called from the runner's thread alone."""

    def __init__(
        self,
        token_bytes: Callable[[], Sequence[bytes]],
        vocab_size: int,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """token_bytes: gives of each id what it adds to the text; called on the first grammar, in the thread.
        clock: CPU seconds of that thread.
        """
        self._clock = clock
        self._token_bytes = token_bytes
        self._vocab_size = vocab_size
        self._words = -(-vocab_size // 32)
        self._slots: dict[int, _Slot] = {}
        self._thread = ThreadPoolExecutor(1, "minisgl-grammar")
        self._tools: _Tools | None = None  # below: the thread's own
        self._cache = GrammarCache()

    def warm(self) -> None:
        """Loads the library and the vocabulary in the thread: the first grammar then finds them there."""
        self._thread.submit(self._load)

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Each slot begins a new life, with a grammar or without. admissions: all of a plan."""
        said: dict[bytes, Grammar] = {}  # by key
        for admission in admissions:
            self._slots.pop(admission.slot, None)
            grammar = admission.sampling.grammar
            if grammar is not None:
                if not grammar.compiled:
                    grammar = msgspec.structs.replace(grammar, compiled=said[grammar.key].compiled)
                said[grammar.key] = grammar
                outputs = unpack_tokens(admission.prompt)[len(admission.prompt) // 4 - admission.num_outputs :]
                self._slots[admission.slot] = _Slot(grammar, tuple(unpack_tokens(grammar.end_ids)), list(outputs))

    @property
    def idle(self) -> bool:
        """No slot has a grammar."""
        return not self._slots

    def begin(self, slots: Rows) -> Future[TokenMasks] | None:
        """Begins to fill the masks of the rows that sample in this step, in their order. None: none has a grammar."""
        if not self._slots:
            return None
        mine = [(row, self._slots[slot]) for row, slot in enumerate(slots.tolist()) if slot in self._slots]
        return self._thread.submit(self._fill, mine) if mine else None

    def drew(self, slots: Rows, tokens: Sequence[int]) -> None:
        """What was drawn for these rows."""
        if not self._slots:
            return
        for slot, token in zip(slots.tolist(), tokens, strict=True):
            entry = self._slots.get(slot)
            if entry is not None and token != NO_TOKEN:
                entry.unseen.append(token)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    # ── in the thread ────────────────────────────────────────────────────────────────────────────────────────────

    def _fill(self, rows: list[tuple[int, _Slot]]) -> TokenMasks:
        bits = np.zeros((len(rows), self._words), np.int32)
        for place, (_, slot) in enumerate(rows):
            try:
                self._fill_row(slot, bits, place)
            except Exception:  # the library's, for a grammar it can not read or a matcher that is at its end
                _log.exception("a grammar failed")
                slot.broken = True
            if slot.broken:
                bits[place] = 0
        return TokenMasks(np.array([row for row, _ in rows], np.int64), torch.from_numpy(bits))

    def _fill_row(self, slot: _Slot, bits: Bits, place: int) -> None:
        if slot.broken:
            return
        tools = self._tools or self._load()
        if slot.matcher is None:
            slot.matcher = tools.library.matcher(self._compile(slot.grammar, tools), slot.ends)
        began_s, free_s = self._clock(), FREE_TOKEN_S * (len(slot.unseen) + 1)
        for token in slot.unseen:
            self._accept(slot, token, tools)
        slot.unseen.clear()
        self._fill_mask(slot, bits, place, tools)
        slot.spent_s += max(0.0, self._clock() - began_s - free_s)
        if slot.spent_s > BUDGET_S:
            _log.error("a form of a client costs too much, %.1f s for one answer: it is ended", slot.spent_s)
            slot.broken = True

    @staticmethod
    def _fill_mask(slot: _Slot, bits: Bits, place: int, tools: _Tools) -> None:
        if slot.over:
            bits[place] = -1
        elif not slot.broken:
            slot.matcher.fill_next_token_bitmask(bits, place, False)
            tools.utf8.lay_over(slot.utf8, bits[place])
            if slot.grammar.json:
                tools.space.lay_over(slot.space, bits[place])
            _set_ends(bits[place], slot.ends, slot.utf8 == WHOLE and slot.matcher.is_completed())

    def _accept(self, slot: _Slot, token: int, tools: _Tools) -> None:
        if slot.broken or slot.over:
            return
        if token in slot.ends:
            slot.over = True
        elif slot.matcher.accept_token(token, False):
            slot.utf8 = tools.utf8.step(slot.utf8, token)
            slot.space = tools.space.step(slot.space, token)
        else:
            slot.broken = True

    def _load(self) -> _Tools:
        token_bytes = (*self._token_bytes()[: self._vocab_size],)
        token_bytes += (b"",) * (self._vocab_size - len(token_bytes))
        library = load_grammar_library()
        compiler = library.compiler(library.vocabulary(token_bytes), lazy=True)
        self._tools = _Tools(library, compiler, Utf8Masks(token_bytes), JsonSpace(token_bytes))
        return self._tools

    def _compile(self, grammar: Grammar, tools: _Tools) -> Any:
        """Milliseconds: the masks, which cost, are computed when a matcher first comes by."""
        compiled = self._cache.get(grammar.key)
        if compiled is None:
            compiled = tools.library.compile(tools.compiler, tools.library.load(zlib.decompress(grammar.compiled)))
            self._cache.put(grammar.key, compiled)
        return compiled


def _set_ends(bits: Bits, ends: Sequence[int], whole: bool) -> None:
    """An end is drawn when the output is whole and only then, also where its bytes would fit as text."""
    words = bits.view(np.uint32)
    for end in ends:
        bit = np.uint32(1 << end % 32)
        if whole:
            words[end // 32] |= bit
        else:
            words[end // 32] &= ~bit
