"""Sampling parameters: the JSON a client sends → checked values → what the workers get.

Where it stands in the flow: `text/request.py` calls `parse_parameters` on Request.parameters and `resolve_sampling`
when the prompt is known; `LLM` builds SamplingParams, sends them as JSON, and so passes the very same checks.

Names and meanings are vLLM's. Values may arrive as numbers or as strings, since that is how Triton's clients send
them. Three things can happen to a key: it is read; it is known but not built, and refused as unsupported unless its
value says "off"; it is unknown, and refused with the nearest known name. Nothing is accepted and ignored.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from minisgl_backend.errors import InvalidRequest, UnsupportedFeature
from minisgl_backend.messages.sampling import Sampling
from minisgl_backend.text.values import (
    MAX_INT,
    flag,
    integer,
    json_object,
    number,
    read_flag,
    read_object,
    real,
    shown,
    text,
    token_ids,
)

MAX_PARAMETERS_BYTES = 1 << 20  # in each place: the stub reads them on Triton's own thread, so it bounds them first
MAX_TEMPERATURE = 100.0  # far beyond it the distribution is flat; a bound keeps 1e308 from the workers
GREEDY_TEMPERATURE = 1e-4  # below it float32 can not tell a draw from the best token: taken as greedy
MAX_SEED = 2**63 - 1
MAX_STOP_TOKEN_IDS = 256  # the scheduler looks every token up in them
MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1
MAX_SALT_CHARS = 256
MAX_DEADLINE_MS = 2.0**31  # 24 days


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request draws its tokens, where it stands in the queue, and how its chat becomes a prompt. Checked when
    a request is made of it, not when it is built.
    """

    max_tokens: int = 16  # 1 … 2**31 - 1; clipped to what the context leaves
    temperature: float = 1.0  # 0 … 100; 0 (and all below 0.0001) is greedy
    top_k: int = 0  # 0 or -1: no limit; 1 is greedy; more than the vocabulary is no limit
    top_p: float = 1.0  # (0, 1]; 1: no limit
    seed: int | None = None  # 0 … 2**63 - 1; None: one is drawn
    ignore_eos: bool = False  # go on past end-of-sequence tokens, not past stop_token_ids
    stop_token_ids: tuple[int, ...] = ()  # end the answer as an end-of-sequence token does; at most 256
    priority: int = 0  # -2**31 … 2**31 - 1; smaller runs earlier
    deadline_ms: float | None = None  # 0 … 2**31, from arrival to the end of the answer; None and 0: none
    cache_salt: str = ""  # at most 256 characters; cached prefixes are shared only under the same salt
    add_generation_prompt: bool = True  # of a chat: its prompt ends where the assistant begins to speak
    chat_template_kwargs: dict[str, Any] | None = None  # of a chat: arguments of the template
    chat_template: str | None = None  # of a chat: in place of the model's; only where the operator allows it

    def to_json(self) -> bytes:
        """The JSON object of Request.parameters. Raises InvalidRequest for a value that JSON can not hold."""
        items: list[str] = []
        for name in self.__struct_fields__:
            try:
                items.append(f'"{name}": {json.dumps(getattr(self, name))}')
            except (TypeError, ValueError, RecursionError):
                kind = type(getattr(self, name)).__name__
                raise InvalidRequest(name, f"has a value of the wrong type: {kind}") from None
        return f"{{{', '.join(items)}}}".encode()


_OFF: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "include_stop_str_in_output": (False,),
    "min_tokens": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "detokenize": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "echo": (False,),
    "guided_decoding": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "response_format": (),
    "json_schema": (),
    "lora_name": (),
    "continue_final_message": (False,),
    "return_token_ids": (False,),
    "logits_processors": ([],),
    "extra_args": (),
}
"""Known and not built → the values that ask for nothing. null asks for nothing everywhere."""


WORD_LISTS = ("stop", "stop_words", "bad_words")
"""Not built: refused as soon as they hold a word."""

PROMPT_INPUTS = ("text_input", "input_ids", "messages", "tools", "image")
"""What a request is about: inputs of their own."""

BOOL_OPTIONS = (
    "stream",
    "exclude_input_in_output",
    "return_finish_reason",
    "return_cumulative_logprob",
    "return_logprobs",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_output_ids",
    "return_perf_metrics",
)
"""How a request wants its answer: inputs of their own, or request parameters."""

_ELSEWHERE = (*PROMPT_INPUTS, *BOOL_OPTIONS, "timeout")
"""What a request gives beside its sampling parameters."""


def parse_parameters(raw: bytes) -> SamplingParams:
    """The sampling parameters of a request: a JSON object in UTF-8, or nothing at all for the defaults.

    Raises InvalidRequest (not such an object, an unknown key, a value out of range) or UnsupportedFeature, each
    naming the field. The messages are plain ASCII of bounded length, whatever the client sent.
    """
    values = json_object(raw, "sampling_parameters", MAX_PARAMETERS_BYTES) if raw else {}
    given = {key: value for key, value in values.items() if _is_read(key, value) and value is not None}
    if "max_tokens" in values and values["max_tokens"] is None:
        raise InvalidRequest("max_tokens", f"must not be null; leave it out for {_DEFAULT.max_tokens}")
    return SamplingParams(**{key: _READERS[key](value) for key, value in given.items()})


_DEFAULT = SamplingParams()

_READERS: dict[str, Callable[[Any], Any]] = {
    "max_tokens": partial(integer, "max_tokens", low=1, high=MAX_INT),
    "temperature": partial(real, "temperature", low=0.0, high=MAX_TEMPERATURE),
    "top_k": partial(integer, "top_k", low=-1, high=MAX_INT),
    "top_p": partial(real, "top_p", low=0.0, high=1.0, low_excluded=True),
    "seed": partial(integer, "seed", low=0, high=MAX_SEED),
    "ignore_eos": partial(flag, "ignore_eos"),
    "stop_token_ids": partial(token_ids, "stop_token_ids", most=MAX_STOP_TOKEN_IDS),
    "priority": partial(integer, "priority", low=MIN_PRIORITY, high=MAX_PRIORITY),
    "deadline_ms": partial(real, "deadline_ms", low=0.0, high=MAX_DEADLINE_MS),
    "cache_salt": partial(text, "cache_salt", most=MAX_SALT_CHARS),
    "add_generation_prompt": partial(flag, "add_generation_prompt"),
    "chat_template_kwargs": partial(read_object, "chat_template_kwargs"),
    "chat_template": partial(text, "chat_template"),
}
"""Field of SamplingParams → how its value is checked."""


def _is_read(key: str, value: Any) -> bool:
    """Whether a key has a reader. Raises for what is not built and for what nobody knows."""
    if key in _READERS:
        return True
    if key in _OFF or key in WORD_LISTS:
        if not (_no_words(value) if key in WORD_LISTS else _asks_for_nothing(value, _OFF[key])):
            raise UnsupportedFeature(key)
        return False
    if key in _ELSEWHERE:
        raise InvalidRequest(key, "is no sampling parameter: give it as an input or parameter of the request itself")
    raise InvalidRequest("sampling_parameters", f"unknown parameter {shown(key)}{_hint(key)}")


def _hint(key: str) -> str:
    """The nearest name that a request may hold; what is read here when none is near."""
    close = difflib.get_close_matches(key[:64], (*_READERS, *_ELSEWHERE, *WORD_LISTS, *_OFF), n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(_READERS))}"


def resolve_sampling(params: SamplingParams, vocab_size: int, seed: int) -> Sampling:
    """Checked parameters → the one form the workers know. `seed` stands in when the request names none.

    What can only give the best token becomes plain greedy: a temperature under GREEDY_TEMPERATURE, top_k = 1, and a
    top_p of at most 1/vocab_size (the best token alone has that much).
    """
    seed = seed if params.seed is None else params.seed
    if params.temperature < GREEDY_TEMPERATURE or params.top_k == 1 or params.top_p * vocab_size <= 1.0:
        return Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=seed, sample_index=0)
    top_k = params.top_k if 0 < params.top_k < vocab_size else 0
    return Sampling(temperature=params.temperature, top_k=top_k, top_p=params.top_p, seed=seed, sample_index=0)


def _asks_for_nothing(value: Any, off_values: tuple[Any, ...]) -> bool:
    return value is None or any(_equals(value, off) for off in off_values)


def _equals(value: Any, off: Any) -> bool:
    if isinstance(off, bool):
        return value is off or (isinstance(value, str) and read_flag(value) is off)
    if isinstance(off, int):
        return number(value) == off
    return type(value) is type(off) and bool(value == off)


def _no_words(value: Any) -> bool:
    """An empty string is no word, alone or in a list."""
    return value in (None, "") or (isinstance(value, list) and all(word == "" for word in value))
