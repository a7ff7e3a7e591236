"""How one sequence draws its tokens: the resolved form that crosses text → scheduler → worker."""

from __future__ import annotations

import msgspec

NO_LOGPROBS = -1
"""In Sampling.logprobs and Sampling.prompt_logprobs: nobody asked."""


class TokenRules(msgspec.Struct, frozen=True, array_like=True):
    """What changes single logits of a row. Most sequences have none, and their rows then cost nothing.

    "Output" is what was sampled; a sequence that is admitted again after a retraction keeps its outputs as such.
    """

    presence_penalty: float = 0.0  # finite; subtracted once from every token of the output
    frequency_penalty: float = 0.0  # finite; subtracted for each time a token stands in the output
    repetition_penalty: float = 1.0  # > 0 and finite; divides (multiplies, where negative) tokens of prompt and output
    bias_ids: bytes = b""  # packed int32, distinct, each below the vocabulary's size
    biases: tuple[float, ...] = ()  # added to the logits of bias_ids; finite
    allowed_ids: bytes = b""  # packed int32, sorted, distinct; no other token is drawn; empty: all are allowed
    bad_words: tuple[bytes, ...] = ()  # packed int32, none empty: a token that would complete one is not drawn
    min_tokens: int = 0  # before so many outputs no token of held_ids is drawn
    held_ids: bytes = b""  # packed int32: all that would end the sequence


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What the output has to match. The worker keeps compiled grammars by their key."""

    key: bytes  # a hash of the grammar, of the tokenizer and of all that its compilation depends on
    compiled: bytes  # as the grammar library serialises it, deflated, without token masks; empty: see Admission
    end_ids: bytes  # packed int32, not empty: what may be drawn when the output is whole
    json: bool = False  # the whole output is one JSON text: white space between its parts is bounded


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """Validated by `text/`; nothing here can make a worker raise.

    A token is a pure function of (logits, seed, sample_index, position), so `seed` is always set: the text actor
    draws one for requests that named none.
    """

    temperature: float  # 0 is greedy; otherwise > 0 and finite
    top_k: int  # 0 is no limit; otherwise 1 … vocabulary size
    top_p: float  # in (0, 1]; 1 is no limit
    seed: int  # 0 … 2**63 - 1
    sample_index: int  # which of the n samples of its request, from 0
    min_p: float = 0.0  # 0 … 1; tokens below so much of the best one's probability are not drawn; 0 is no limit
    logprobs: int = NO_LOGPROBS  # of each output token, and of so many of the best beside it
    prompt_logprobs: int = NO_LOGPROBS  # the same of each prompt token but the first
    rules: TokenRules | None = None
    grammar: Grammar | None = None


GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0, sample_index=0)
