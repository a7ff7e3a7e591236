"""Answers that a grammar lets through, drawn at random: no model, but the compiler, the masks and the sampler as they
are. Where an answer may end it soon does, and what closes is likelier than what opens, so that answers are short.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from minisgl_backend.messages.ids import SlotId
from minisgl_backend.messages.plan import NO_TOKEN, Admission
from minisgl_backend.messages.sampling import Grammar, Sampling
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.sampling.draw import draw_tokens
from minisgl_backend.sampling.grammar import GrammarSlots
from minisgl_backend.sampling.parameters import SamplingColumns
from minisgl_backend.text.detokenizer import decode
from minisgl_backend.text.tokenizer import Tokenizer

_CLOSING = (b'"', b"}", b"]", b'"}', b'"]', b"]}")
UNFINISHED = None


def random_answers(
    tokenizer: Tokenizer, grammars: Sequence[Grammar], end: int, seed: int, max_tokens: int = 400
) -> list[str | None]:
    """Of each grammar one answer as its client would read it; None: it met max_tokens, or nothing could be drawn."""
    slots = GrammarSlots(lambda: tokenizer.shown_bytes, tokenizer.vocab_size)
    draw = torch.Generator().manual_seed(seed)
    closing = [i for i, data in enumerate(tokenizer.shown_bytes) if data in _CLOSING]
    try:
        prompt = pack_tokens([1])
        sampling = [Sampling(1.0, 0, 1.0, seed + i, 0, grammar=grammar) for i, grammar in enumerate(grammars)]
        slots.admit([Admission(SlotId(i), prompt, own) for i, own in enumerate(sampling)])
        columns = SamplingColumns.greedy(len(grammars))
        for i, own in enumerate(sampling):
            columns.put(i, own)
        answers: list[list[int]] = [[] for _ in grammars]
        open_rows, texts = list(range(len(grammars))), [UNFINISHED] * len(grammars)
        for position in range(1, max_tokens):
            rows = np.array(open_rows, np.int64)
            filling = slots.begin(rows)
            assert filling is not None
            logits = torch.randn(len(rows), tokenizer.vocab_size, generator=draw) * 2
            logits[:, closing] += min(position / 8, 8)
            logits[:, end] += 6
            masks = filling.result()
            drawn = draw_tokens(logits, columns.take(rows), np.full(len(rows), position), None, masks).tolist()
            slots.drew(rows, drawn)
            for row, token in zip(open_rows, drawn, strict=True):
                if token == end:
                    texts[row] = decode(tokenizer, answers[row], [1])
                elif token != NO_TOKEN:
                    answers[row].append(token)
            open_rows = [r for r, token in zip(open_rows, drawn, strict=True) if token not in (end, NO_TOKEN)]
            if not open_rows:
                break
        return texts
    finally:
        slots.close()
