"""The logprobs of one prompt → their JSON, in slices: of a long prompt it takes tenths of a second in all.

    worker ── Logprobs of each chunk of the prompt ──► add ── write_some, a slice a turn of the loop ──► take

Where it stands in the flow: owned by the request's record (`text/record.py`). The text actor has slices written between
its messages, so the streams of others keep their pace; while later chunks are computed, earlier ones are written.
"""

from __future__ import annotations

from collections import deque

from minisgl_backend.errors import InvalidRequest
from minisgl_backend.messages.plan import Logprobs
from minisgl_backend.text.logprobs import Row, joined, row_json, rows
from minisgl_backend.text.parameters import MAX_PROMPT_LOGPROBS
from minisgl_backend.text.tokenizer import Tokenizer

SLICE_ENTRIES = 1024
"""Tokens and their best ones: some two milliseconds."""


def refuse_many(prompt_logprobs: int | None, tokens: int) -> None:
    """Whether those of a prompt of so many tokens can be told. Raises InvalidRequest."""
    if prompt_logprobs is None or tokens * (1 + prompt_logprobs) <= MAX_PROMPT_LOGPROBS:
        return
    most = MAX_PROMPT_LOGPROBS // tokens - 1
    if most < 0:
        raise InvalidRequest(
            "prompt_logprobs", f"are told of prompts of at most {MAX_PROMPT_LOGPROBS} tokens, got {tokens}"
        )
    raise InvalidRequest(
        "prompt_logprobs", f"must be at most {most} with a prompt of {tokens} tokens, got {prompt_logprobs}"
    )


class PromptWriter:
    """What is told comes in the order of the prompt; after a retraction it begins again, with the same."""

    __slots__ = ("_fresh", "_num_tokens", "_pieces", "_tokenizer", "_told")

    def __init__(self, num_tokens: int, tokenizer: Tokenizer) -> None:
        """num_tokens: of the prompt, the first of which nothing is told."""
        self._num_tokens = num_tokens
        self._tokenizer = tokenizer
        self._told: deque[Logprobs] = deque()
        self._fresh: deque[Row] = deque()  # of the first of them, not written yet
        self._pieces = [b"null"]  # JSON of each token

    @property
    def is_behind(self) -> bool:
        """Something is told and not written yet."""
        return bool(self._told or self._fresh)

    @property
    def is_complete(self) -> bool:
        return len(self._pieces) >= self._num_tokens

    def add(self, told: Logprobs) -> None:
        """Costs nothing yet."""
        self._told.append(told)

    def write_some(self) -> None:
        """At most SLICE_ENTRIES, or those of one token if they are more."""
        entries = 0
        while self.is_behind:
            if not self._fresh:
                self._read(self._told.popleft())
                continue
            entries += len(self._fresh[0].ids)
            if entries > SLICE_ENTRIES and entries > len(self._fresh[0].ids):
                return
            self._pieces.append(row_json(self._fresh.popleft(), self._tokenizer))

    def take(self) -> bytes:
        """See PromptLogprobs.logprobs. Once, when it is complete."""
        return joined(self._pieces)

    def _read(self, told: Logprobs) -> None:
        known = len(self._pieces) - told.position
        assert known >= 0, "logprobs of a prompt with a gap"
        self._fresh.extend(rows(told)[known:])
