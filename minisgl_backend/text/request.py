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
from minisgl_backend.messages.engine import Samples, Sequence
from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.messages.sampling import NO_LOGPROBS, Grammar, Sampling
from minisgl_backend.messages.tokens import count_tokens, unpack_tokens
from minisgl_backend.text.detokenizer import decode
from minisgl_backend.text.limits import RequestLimits, refuse_echoes, refuse_kept_logprobs
from minisgl_backend.text.parameters import SamplingParams, parse_parameters
from minisgl_backend.text.parsing import Parsing, check_parsing, resolve_parsing
from minisgl_backend.text.prompt import Prompt, PromptTokens, TextPrompt, encode_prompt, kept_tokens, read_prompt
from minisgl_backend.text.prompt_logprobs import refuse_many
from minisgl_backend.text.sample import Reading
from minisgl_backend.text.sampling import check_ids, resolve_sampling, token_rules
from minisgl_backend.text.structured.spec import STRUCTURED_FIELDS, GrammarSpec, read_structured
from minisgl_backend.text.tokenizer import Tokenizer


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """A request whose fields are right, its prompt not yet tokenised."""

    prompt: Prompt
    params: SamplingParams
    priority: int
    timeout_s: float | None  # from arrival to the end of the answer
    stream: bool
    echo_prompt: bool  # the prompt stands in front of the text of each answer
    cumulative_logprob: bool  # logprobs are computed although no parameter asks for them
    parses: bool = False  # reasoning and tool calls come apart from the text

    @property
    def may_have_form(self) -> bool:
        """Whether `answer_form` is to be asked before it is tokenised."""
        return any(getattr(self.params, name) is not None for name in STRUCTURED_FIELDS)


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """A request that will run."""

    prompt_ids: bytes  # packed int32, 1 … RequestLimits.prompt_tokens ids, each below the vocabulary's size
    prompt_text: str  # stands in front of the text of each answer; empty unless the prompt is to be echoed
    sampling: Sampling  # of the first answer
    num_samples: int  # ≥ 1
    max_new_tokens: int  # ≥ 1, clipped by the length rule
    stop_token_ids: tuple[int, ...]  # sorted; the model's own ends are not among them with ignore_eos
    stop: tuple[str, ...]  # none empty
    reading: Reading
    skip_special_tokens: bool
    tell_prompt_logprobs: bool
    return_token_ids: bool
    priority: int
    timeout_s: float | None
    cache_salt: bytes  # cached prefixes are shared only under the same salt
    stream: bool
    parsing: Parsing | None = None  # how reasoning and tool calls are read; None: they are text

    @property
    def num_input_tokens(self) -> int:
        return count_tokens(self.prompt_ids)

    def sequences(self, sequence_id: SequenceId, arrived_s: float) -> Sequence | Samples:
        """What the scheduler gets. sequence_id: of the first answer; those of the others follow. arrived_s: when the
        request came, on the monotonic clock.
        """
        first = self.sequence(sequence_id, arrived_s)
        return first if self.num_samples == 1 else Samples(first, self.num_samples)

    def sequence(self, sequence_id: SequenceId, arrived_s: float) -> Sequence:
        """Of the first answer."""
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
    params = parse_parameters(request.parameters, limits.defaults)
    if params.n > limits.sequences:
        raise InvalidRequest("n", f"must be at most {limits.sequences}, which this server takes at all, got {params.n}")
    prompt = read_prompt(request, params, tokenizer, limits)
    check_parsing(request, limits)
    check_ids(params, tokenizer.vocab_size)
    return Checked(
        prompt=prompt,
        params=params,
        priority=_priority(params, limits),
        timeout_s=_timeout_s(request, params),
        stream=request.stream,
        echo_prompt=_echoes(request, params, prompt),
        cumulative_logprob=request.return_cumulative_logprob,
        parses=request.parse_output,
    )


def answer_form(checked: Checked, tokenizer: Tokenizer) -> tuple[GrammarSpec, tuple[int, ...]] | None:
    """The form that the answer must have, and what ends it once it is whole; None: any.

    Slow for large schemas: runs in a thread. Raises InvalidRequest or UnsupportedFeature, naming the field.
    """
    params = checked.params
    spec = read_structured({name: getattr(params, name) for name in STRUCTURED_FIELDS})
    if spec is None:
        return None
    if params.ignore_eos:
        raise InvalidRequest("ignore_eos", f"must be false with {spec.field}: such an answer ends when it is whole")
    if params.allowed_token_ids is not None:  # nobody can say beforehand that both always have a token in common
        raise InvalidRequest("allowed_token_ids", f"can not be given together with {spec.field}")
    ends = _form_ends(params, tokenizer)
    if not ends:
        raise InvalidRequest(spec.field, "needs stop_token_ids: this model has no end-of-sequence token")
    return spec, ends


def tokenise(
    checked: Checked,
    tokenizer: Tokenizer,
    limits: RequestLimits,
    draw_seed: Callable[[], int],
    grammar: Grammar | None = None,
) -> Accepted:
    """Encodes the prompt and the bad words, and applies the length rule. Slow for long texts and chats: may run in a
    thread.

    draw_seed: gives 0 … 2**63 - 1; called once, and only when the request names no seed. grammar: of `answer_form`.
    Raises InvalidRequest or UnsupportedFeature naming the field.
    """
    params = checked.params
    prompt = encode_prompt(checked.prompt, tokenizer, limits, kept_tokens(params, limits))
    max_new_tokens = min(params.max_tokens, limits.sequence_tokens - count_tokens(prompt.ids))
    refuse_many(params.prompt_logprobs, count_tokens(prompt.ids))
    if not checked.stream:  # those of a stream are sent as they come
        refuse_kept_logprobs(params.logprobs, params.n, max_new_tokens)
    prompt_text = _echoed(checked.prompt, prompt, tokenizer) if checked.echo_prompt else ""
    refuse_echoes(prompt_text, params.n)
    seed = draw_seed() if params.seed is None else params.seed
    ends = _ends(params, tokenizer)
    rules = token_rules(params, tokenizer, ends)
    sampling = resolve_sampling(params, tokenizer.vocab_size, seed, rules, checked.cumulative_logprob)
    if grammar is not None:
        sampling = msgspec.structs.replace(sampling, grammar=grammar)
    parsing = None
    if checked.parses:
        has_form = grammar is not None
        parsing = resolve_parsing(checked.prompt, prompt, tokenizer, limits, stream=checked.stream, has_form=has_form)
    return Accepted(
        prompt_ids=prompt.ids,
        prompt_text=prompt_text,
        sampling=sampling,
        num_samples=params.n,
        max_new_tokens=max_new_tokens,
        stop_token_ids=ends,
        stop=tuple(params.stop),
        reading=Reading(
            stop_token_ids=frozenset(ends),
            show_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            computes_logprobs=sampling.logprobs != NO_LOGPROBS,
            tells_logprobs=params.logprobs is not None,
        ),
        skip_special_tokens=params.skip_special_tokens,
        tell_prompt_logprobs=params.prompt_logprobs is not None,
        return_token_ids=params.return_token_ids,
        priority=checked.priority,
        timeout_s=checked.timeout_s,
        cache_salt=params.cache_salt.encode(),
        stream=checked.stream,
        parsing=parsing,
    )


def _ends(params: SamplingParams, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that end an answer, sorted. Files of a model may name more than it has."""
    own = () if params.ignore_eos else (i for i in tokenizer.eos_token_ids if i < tokenizer.vocab_size)
    return tuple(sorted({*own, *params.stop_token_ids}))


def _form_ends(params: SamplingParams, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Of `_ends` those that are drawn when a form is whole, and never before. A stop token that has a text is a part of
    the form instead, as in vLLM: it ends the answer wherever the form lets it be drawn. Unless there is no other end.
    """
    ends = _ends(params, tokenizer)
    silent = tuple(i for i in ends if i in tokenizer.eos_token_ids or not tokenizer.shown_bytes[i])
    return silent or ends


def _echoes(request: Request, params: SamplingParams, prompt: Prompt) -> bool:
    """Whether the prompt stands in front of the answer: by default it does, unless streamed, and only a text can."""
    field, exclude = "exclude_input_in_output", request.exclude_input_in_output
    if params.echo is not None and exclude is params.echo:
        raise InvalidRequest("echo", f"says one thing and {field} another")
    if request.stream and exclude is False and not params.echo:
        raise InvalidRequest(field, "must not be false when stream is true")
    if isinstance(prompt, TextPrompt):
        return params.echo if params.echo is not None else not request.stream and not exclude
    if exclude is False:
        raise InvalidRequest(field, f"must not be false with {prompt.field}: only text_input can be echoed")
    if params.echo:
        raise InvalidRequest("echo", f"must not be true with {prompt.field}: only text_input can be echoed")
    return False


def _echoed(prompt: Prompt, tokens: PromptTokens, tokenizer: Tokenizer) -> str:
    """What stands in front of an answer: the text as it was given, or what truncate_prompt_tokens has left of it."""
    assert isinstance(prompt, TextPrompt)
    if not tokens.cut:
        return prompt.text
    return decode(tokenizer, unpack_tokens(tokens.ids), skip_special_tokens=False)


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
