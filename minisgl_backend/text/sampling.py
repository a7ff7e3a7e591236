"""Checked parameters → how the workers draw: the last place where a request can be refused for them.

Where it stands in the flow: `text/request.py` calls `check_ids` when a request arrives, and `token_rules` and
`resolve_sampling` when its prompt is known. What comes out keeps every promise of `messages/sampling.py`; one more is
made here: however the rules of a row work together, a token is left that may be drawn.
"""

from __future__ import annotations

from collections.abc import Iterable

from minisgl_backend.errors import InvalidRequest
from minisgl_backend.messages.sampling import NO_LOGPROBS, Sampling, TokenRules
from minisgl_backend.messages.tokens import pack_tokens
from minisgl_backend.text.parameters import GREEDY_TEMPERATURE, SamplingParams
from minisgl_backend.text.tokenizer import Tokenizer


def check_ids(params: SamplingParams, vocab_size: int) -> None:
    """Every token id must be one of the model's. Raises InvalidRequest, naming the field and the place."""
    for field in ("stop_token_ids", "allowed_token_ids"):
        for place, token in enumerate(getattr(params, field) or ()):
            if token >= vocab_size:
                raise InvalidRequest(field, f"must be from 0 to {vocab_size - 1}, got {token} at position {place}")
    for token in params.logit_bias or ():
        if token >= vocab_size:
            raise InvalidRequest("logit_bias", f"must have keys from 0 to {vocab_size - 1}, got {token}")


def resolve_sampling(
    params: SamplingParams, vocab_size: int, seed: int, rules: TokenRules | None = None, logprobs: bool = False
) -> Sampling:
    """The one form the workers know, of the first of n answers.

    seed: stands in when the request names none. logprobs: those of the tokens themselves are wanted in any case.
    What can only give the best token becomes plain greedy: a temperature under GREEDY_TEMPERATURE, top_k = 1, and a
    top_p of at most 1/vocab_size (the best token alone has that much).
    """
    greedy = params.temperature < GREEDY_TEMPERATURE or params.top_k == 1 or params.top_p * vocab_size <= 1.0
    told = params.logprobs if params.logprobs is not None else 0 if logprobs else NO_LOGPROBS
    told_of_prompt = NO_LOGPROBS if params.prompt_logprobs is None else params.prompt_logprobs
    return Sampling(
        temperature=0.0 if greedy else params.temperature,
        top_k=params.top_k if not greedy and 0 < params.top_k < vocab_size else 0,
        top_p=1.0 if greedy else params.top_p,
        seed=seed if params.seed is None else params.seed,
        sample_index=0,
        min_p=0.0 if greedy else params.min_p,
        logprobs=min(told, vocab_size),
        prompt_logprobs=min(told_of_prompt, vocab_size),
        rules=rules,
    )


def token_rules(params: SamplingParams, tokenizer: Tokenizer, ends: Iterable[int]) -> TokenRules | None:
    """None when nothing is asked of single tokens. ends: the ids that would end the answer.

    Raises InvalidRequest for a bad word that is no token, and when no token would be left to draw.
    """
    bias = sorted((params.logit_bias or {}).items())
    bad_words = _bad_words(params.bad_words, tokenizer)
    held = sorted(set(ends)) if params.min_tokens else []
    rules = TokenRules(
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        bias_ids=pack_tokens(token for token, _ in bias),
        biases=tuple(amount for _, amount in bias),
        allowed_ids=pack_tokens(sorted(set(params.allowed_token_ids or ()))),
        bad_words=tuple(pack_tokens(word) for word in bad_words),
        min_tokens=params.min_tokens if held else 0,
        held_ids=pack_tokens(held),
    )
    _check_some_left(params, {word[-1] for word in bad_words}, held, tokenizer.vocab_size)
    return None if rules == _NO_RULES else rules


_NO_RULES = TokenRules()


def _check_some_left(params: SamplingParams, banned: set[int], held: list[int], vocab_size: int) -> None:
    """Some token must be left whatever has been generated: one that ends no bad word and, early on, no answer."""
    never = banned.union(held)
    allowed = params.allowed_token_ids
    if len(never) < vocab_size if allowed is None else set(allowed) - never:
        return
    reasons = [name for name, ids in (("bad_words", banned), ("min_tokens", held)) if ids]
    field = reasons[0] if allowed is None else "allowed_token_ids"
    raise InvalidRequest(field, f"may leave nothing to draw, together with {' and '.join(reasons)}")


def _bad_words(words: Iterable[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The token sequences of each word, as vLLM takes them: as it stands, and behind a space where that is another
    sequence of the same length.
    """
    found: dict[tuple[int, ...], None] = {}
    for place, word in enumerate(words):
        bare, spaced = (_encoded(text, tokenizer) for text in (word.lstrip(), f" {word.lstrip()}"))
        if not bare or max(*bare, *spaced) >= tokenizer.vocab_size:
            raise InvalidRequest("bad_words", f"must be made of the model's tokens; that at position {place} is not")
        found[bare] = None
        if spaced and spaced[0] != bare[0] and len(spaced) == len(bare):
            found[spaced] = None
    return list(found)


def _encoded(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    try:
        return tuple(tokenizer.encode(text, add_special_tokens=False))
    except Exception as error:  # the tokenizers package raises bare Exception, and only for what it can not encode
        raise InvalidRequest("bad_words", f"can not be tokenised: {ascii(str(error))[:200]}") from None
