"""Both kinds of tokenizer, as fixtures."""

from __future__ import annotations

from fakes.text_fixtures import byte_level, sentencepiece, tokenizer

__all__ = ["byte_level", "sentencepiece", "tokenizer"]
