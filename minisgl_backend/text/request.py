"""A client's request → a prompt that the scheduler may trust, or a refusal that names the field.

Where it stands in the flow: the text actor calls `check_request` when a request arrives (cheap: microseconds plus
one pass over the bytes) and `tokenise` next, for long prompts in a thread. Both are pure apart from `draw_seed` and
share nothing that changes, so any number may run at once. What passes here can not raise in the scheduler or a worker.

The length rule. Let L be the tokens of the prompt and C the smaller of the context and the KV pool, in tokens.
A prompt needs L + 1 <= C: it has room for one token of answer. An answer has at most C - L tokens, so `max_tokens` is
clipped to that and the answer then ends with finish_reason `length`. L = C - 1 with max_tokens = 1 always works.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from minisgl_backend.errors import InvalidRequest, UnsupportedFeature
from minisgl_backend.messages.client import Request
from minisgl_backend.messages.engine import Sequence
from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.messages.sampling import Sampling
from minisgl_backend.messages.tokens import count_tokens
from minisgl_backend.text.limits import RequestLimits
from minisgl_backend.text.parameters import SamplingParams, parse_parameters, resolve_sampling
from minisgl_backend.text.prompt import Prompt, TextPrompt, prompt_ids, read_prompt
from minisgl_backend.text.tokenizer import Tokenizer


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """A request whose fields are right, its prompt not yet tokenised."""

    prompt: Prompt
    params: SamplingParams
    priority: int
    timeout_s: float | None  # from arrival to the end of the answer
    stream: bool
    echo_prompt: bool  # the prompt stands in front of the text of the answer


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """A request that will run."""

    prompt_ids: bytes  # packed int32, 1 … RequestLimits.prompt_tokens ids, each below the vocabulary's size
    prompt_text: str  # stands in front of the answer's text; empty unless the prompt is to be echoed
    sampling: Sampling
    max_new_tokens: int  # ≥ 1, clipped by the length rule
    stop_token_ids: tuple[int, ...]  # sorted; the model's own ends are not among them with ignore_eos
    priority: int
    timeout_s: float | None
    cache_salt: bytes  # cached prefixes are shared only under the same salt
    stream: bool

    @property
    def num_input_tokens(self) -> int:
        return count_tokens(self.prompt_ids)

    def sequence(self, sequence_id: SequenceId, arrived_s: float) -> Sequence:
        """What the scheduler gets of it. arrived_s: when the request came, on the monotonic clock."""
        return Sequence(
            id=sequence_id,
            prompt=self.prompt_ids,
            sampling=self.sampling,
            max_new_tokens=self.max_new_tokens,
            stop_token_ids=self.stop_token_ids,
            priority=self.priority,
            deadline_s=None if self.timeout_s is None else arrived_s + self.timeout_s,
            cache_salt=self.cache_salt,
        )


def check_request(request: Request, tokenizer: Tokenizer, limits: RequestLimits) -> Checked:
    """All that can be said of a request without tokenising it.

    Raises InvalidRequest or UnsupportedFeature, naming the field.
    """
    params = parse_parameters(request.parameters)
    prompt = read_prompt(request, params, tokenizer, limits)
    _check_stop_tokens(params.stop_token_ids, tokenizer.vocab_size)
    return Checked(
        prompt=prompt,
        params=params,
        priority=_priority(params, limits),
        timeout_s=_timeout_s(request, params),
        stream=request.stream,
        echo_prompt=_echoes(request, prompt),
    )


def tokenise(checked: Checked, tokenizer: Tokenizer, limits: RequestLimits, draw_seed: Callable[[], int]) -> Accepted:
    """Encodes the prompt and applies the length rule. Slow for long texts and chats: may run in a thread.

    draw_seed: gives 0 … 2**63 - 1; called once, and only when the request names no seed.
    Raises InvalidRequest or UnsupportedFeature naming the prompt's field.
    """
    ids = prompt_ids(checked.prompt, tokenizer, limits)
    params = checked.params
    seed = draw_seed() if params.seed is None else params.seed
    echoed = checked.prompt if checked.echo_prompt else None
    own_ends = () if params.ignore_eos else tokenizer.eos_token_ids
    return Accepted(
        prompt_ids=ids,
        prompt_text=echoed.text if isinstance(echoed, TextPrompt) else "",
        sampling=resolve_sampling(params, tokenizer.vocab_size, seed),
        max_new_tokens=min(params.max_tokens, limits.sequence_tokens - count_tokens(ids)),
        stop_token_ids=tuple(sorted({*own_ends, *params.stop_token_ids})),
        priority=checked.priority,
        timeout_s=checked.timeout_s,
        cache_salt=params.cache_salt.encode(),
        stream=checked.stream,
    )


def _echoes(request: Request, prompt: Prompt) -> bool:
    """Whether the prompt stands in front of the answer: by default it does, unless streamed, and only a text can."""
    field, exclude = "exclude_input_in_output", request.exclude_input_in_output
    if request.stream and exclude is False:
        raise InvalidRequest(field, "must not be false when stream is true")
    if not isinstance(prompt, TextPrompt):
        if exclude is False:
            raise InvalidRequest(field, f"must not be false with {prompt.field}: only text_input can be echoed")
        return False
    return not request.stream and not exclude


def _check_stop_tokens(ids: tuple[int, ...], vocab_size: int) -> None:
    for place, token in enumerate(ids):
        if token >= vocab_size:
            raise InvalidRequest(
                "stop_token_ids", f"must be from 0 to {vocab_size - 1}, got {token} at position {place}"
            )


def _priority(params: SamplingParams, limits: RequestLimits) -> int:
    if params.priority and not limits.priorities:
        raise UnsupportedFeature("priority", "this server's policy is not `priority`: leave it out, or send 0")
    return params.priority


def _timeout_s(request: Request, params: SamplingParams) -> float | None:
    deadline_us = math.ceil((params.deadline_ms or 0.0) * 1000)
    if request.timeout_us and deadline_us and request.timeout_us != deadline_us:
        raise InvalidRequest("deadline_ms", "is another time than the one that the request's timeout gives")
    timeout_us = request.timeout_us or deadline_us
    return timeout_us / 1e6 if timeout_us else None
