"""Sampling parameters: the JSON a client sends → checked values → what the workers get.

Where it stands in the flow: `text/request.py` calls `parse_parameters` on Request.parameters, and `text/sampling.py`
turns the result into what the workers know; `LLM` builds SamplingParams, sends them as JSON, and so passes the very
same checks. docs/parameters.md is the table of all names, ranges and refusals.

Names and meanings are vLLM's. Values may arrive as numbers or as strings, since that is how Triton's clients send
them. Three things can happen to a key: it is read; it is known but not built, and refused as unsupported unless its
value says "off"; it is unknown, and refused with the nearest known name. Nothing is accepted and ignored.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from minisgl_backend.errors import InvalidRequest, UnsupportedFeature
from minisgl_backend.text.structured.spec import KEEPERS
from minisgl_backend.text.values import (
    MAX_INT,
    biases,
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
    words,
)

MAX_PARAMETERS_BYTES = 1 << 20  # in each place: the stub reads them on Triton's own thread, so it bounds them first
MAX_TEMPERATURE = 100.0  # far beyond it the distribution is flat; a bound keeps 1e308 from the workers
GREEDY_TEMPERATURE = 1e-4  # below it float32 can not tell a draw from the best token: taken as greedy
MAX_SEED = 2**63 - 1
MAX_STOP_TOKEN_IDS = 256  # the scheduler looks every token up in them
MAX_N = 128  # sequences of one request
MAX_LOGPROBS = 20  # beside the token itself
MAX_PROMPT_LOGPROBS = 1 << 18  # tokens of a prompt, each with the best ones beside it: 20 MB of JSON
MAX_PENALTY = 2.0  # of presence and frequency, either way
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0  # beyond them logits leave what fp16 can hold
MAX_BIAS = 100.0
MAX_BIASES = 4096
MAX_STOPS, MAX_STOP_CHARS = 64, 4096  # how many, and of all together
MAX_BAD_WORDS, MAX_BAD_WORD_CHARS = 256, 8192
MAX_ALLOWED_TOKEN_IDS = 1 << 17
MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1
MAX_SALT_CHARS = 256
MAX_DEADLINE_MS = 2.0**31  # 24 days


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request draws its tokens, where it ends, what of it is told and shown, where it stands in the queue, and
    how its chat becomes a prompt. Checked when a request is made of it, not when it is built.
    """

    n: int = 1  # 1 … 128 answers to one prompt; more than 1 needs a temperature
    max_tokens: int = 16  # 1 … 2**31 - 1; clipped to what the context leaves
    min_tokens: int = 0  # 0 … max_tokens; before so many nothing ends the answer
    temperature: float = 1.0  # 0 … 100; 0 (and all below 0.0001) is greedy
    top_k: int = 0  # 0 or -1: no limit; 1 is greedy; more than the vocabulary is no limit
    top_p: float = 1.0  # (0, 1]; 1: no limit
    min_p: float = 0.0  # 0 … 1, of the best token's probability; 0: no limit
    seed: int | None = None  # 0 … 2**63 - 1; None and -1: one is drawn
    presence_penalty: float = 0.0  # -2 … 2
    frequency_penalty: float = 0.0  # -2 … 2
    repetition_penalty: float = 1.0  # 0.01 … 100; 1: none
    logit_bias: dict[int, float] | None = None  # token id → -100 … 100, added to its logit; at most 4096
    bad_words: str | Sequence[str] = ()  # not generated; at most 256
    allowed_token_ids: Sequence[int] | None = None  # nothing else is drawn; not empty
    stop: str | Sequence[str] = ()  # end the answer, which is cut before them; at most 64
    stop_token_ids: Sequence[int] = ()  # end the answer as an end-of-sequence token does; at most 256
    include_stop_str_in_output: bool = False  # cut behind the stop string, show the stop token
    ignore_eos: bool = False  # go on past end-of-sequence tokens, not past stop_token_ids
    logprobs: int | None = None  # 0 … 20: of each token, and of so many of the best; not streamed, 2**18 in all
    prompt_logprobs: int | None = None  # the same of the prompt's tokens; at most 2**18 in all, theirs and the best
    skip_special_tokens: bool = True  # in the text of the answer
    spaces_between_special_tokens: bool = True  # of no effect: the decoders taken here put none
    truncate_prompt_tokens: int | None = None  # keep so many of the prompt's last tokens; -1: as many as fit
    echo: bool | None = None  # the text_input in front of the answer; None: exclude_input_in_output says
    return_token_ids: bool = False  # of prompt and answer
    structured_outputs: Any = (
        None  # the answer's form: one of json, json_object, regex, choice, grammar, structural_tag
    )
    guided_json: Any = None  # the same by its older name: a JSON schema
    guided_regex: str | None = None
    guided_choice: Sequence[str] | None = None
    guided_grammar: str | None = None  # EBNF
    response_format: Any = None  # the same in OpenAI's form
    json_schema: Any = None  # the same: a JSON schema
    priority: int = 0  # -2**31 … 2**31 - 1; smaller runs earlier
    deadline_ms: float | None = None  # 0 … 2**31, from arrival to the end of the answer; None and 0: none
    cache_salt: str = ""  # at most 256 characters; cached prefixes are shared only under the same salt
    add_generation_prompt: bool | None = None  # of a chat: its prompt ends where the assistant begins; None: it does
    continue_final_message: bool = False  # of a chat: the answer goes on with the last message, the assistant's
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
    "best_of": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "top_logprobs": (0,),
    "detokenize": (True,),
    "guided_decoding": (),
    "lora_name": (),
    "logits_processors": ([],),
    "extra_args": (),
}
"""Known and not built → the values that ask for nothing. null asks for nothing everywhere."""

_NOT_BUILT = {"top_logprobs": "is no parameter here: give the number as logprobs"}
"""What a refusal says instead of that this version does not support it."""

WORD_LISTS = ("stop", "stop_words", "bad_words")
"""Lists of words; `stop_words` joins `stop`. An empty string is no word: Triton's clients pad with them."""

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
    "parse_output",
)
"""How a request wants its answer: inputs of their own, or request parameters."""

_ELSEWHERE = (*PROMPT_INPUTS, *BOOL_OPTIONS, "timeout")
"""What a request gives beside its sampling parameters."""


def parse_parameters(raw: bytes, defaults: SamplingParams | None = None) -> SamplingParams:
    """The sampling parameters of a request: a JSON object in UTF-8, or nothing at all for the defaults.

    defaults: in place of vLLM's, checked already. Raises InvalidRequest (not such an object, an unknown key, a value
    out of range, two that contradict each other) or UnsupportedFeature, each naming the field. The messages are plain
    ASCII of bounded length, whatever the client sent.
    """
    values = json_object(raw, "sampling_parameters", MAX_PARAMETERS_BYTES) if raw else {}
    given = {key: value for key, value in values.items() if _is_read(key, value) and value is not None}
    if "max_tokens" in values and values["max_tokens"] is None:
        raise InvalidRequest("max_tokens", f"must not be null; leave it out for {_DEFAULT.max_tokens}")
    read = {key: READERS[key](value) for key, value in given.items()}
    if "stop_words" in read:
        read["stop"] = tuple(dict.fromkeys((*read.get("stop", ()), *read.pop("stop_words"))))
    params = msgspec.structs.replace(defaults or _DEFAULT, **read)
    _check_together(params)
    return params


_DEFAULT = SamplingParams()


def _check_together(params: SamplingParams) -> None:
    """Values that contradict each other."""
    if params.min_tokens > params.max_tokens:
        raise InvalidRequest("min_tokens", f"must be at most max_tokens = {params.max_tokens}, got {params.min_tokens}")
    if params.n > 1 and params.temperature < GREEDY_TEMPERATURE:
        raise InvalidRequest("n", f"must be 1 when temperature is 0, where all answers are the same, got {params.n}")


def _seed(value: Any) -> int | None:
    return None if number(value) == -1 else integer("seed", value, low=0, high=MAX_SEED)


def _logprobs(field: str, value: Any) -> int | None:
    """true is 1, as for vLLM."""
    if isinstance(value, bool):
        return 1 if value else None
    return integer(field, value, low=0, high=MAX_LOGPROBS)


def _allowed(value: Any) -> tuple[int, ...]:
    ids = token_ids("allowed_token_ids", value, most=MAX_ALLOWED_TOKEN_IDS)
    if not ids:
        raise InvalidRequest("allowed_token_ids", "must not be empty: nothing could be drawn")
    return ids


def _truncate(value: Any) -> int:
    tokens = integer("truncate_prompt_tokens", value, low=-1, high=MAX_INT)
    if tokens == 0:
        raise InvalidRequest("truncate_prompt_tokens", f"must be -1 or an integer from 1 to {MAX_INT}, got 0")
    return tokens


_STOPS = {"most": MAX_STOPS, "most_chars": MAX_STOP_CHARS}

READERS: dict[str, Callable[[Any], Any]] = {
    "n": partial(integer, "n", low=1, high=MAX_N),
    "max_tokens": partial(integer, "max_tokens", low=1, high=MAX_INT),
    "min_tokens": partial(integer, "min_tokens", low=0, high=MAX_INT),
    "temperature": partial(real, "temperature", low=0.0, high=MAX_TEMPERATURE),
    "top_k": partial(integer, "top_k", low=-1, high=MAX_INT),
    "top_p": partial(real, "top_p", low=0.0, high=1.0, low_excluded=True),
    "min_p": partial(real, "min_p", low=0.0, high=1.0),
    "seed": _seed,
    "presence_penalty": partial(real, "presence_penalty", low=-MAX_PENALTY, high=MAX_PENALTY),
    "frequency_penalty": partial(real, "frequency_penalty", low=-MAX_PENALTY, high=MAX_PENALTY),
    "repetition_penalty": partial(real, "repetition_penalty", low=MIN_REPETITION_PENALTY, high=MAX_REPETITION_PENALTY),
    "logit_bias": partial(biases, "logit_bias", most=MAX_BIASES, limit=MAX_BIAS),
    "bad_words": partial(words, "bad_words", most=MAX_BAD_WORDS, most_chars=MAX_BAD_WORD_CHARS),
    "allowed_token_ids": _allowed,
    "stop": partial(words, "stop", **_STOPS),
    "stop_words": partial(words, "stop_words", **_STOPS),
    "stop_token_ids": partial(token_ids, "stop_token_ids", most=MAX_STOP_TOKEN_IDS),
    "include_stop_str_in_output": partial(flag, "include_stop_str_in_output"),
    "ignore_eos": partial(flag, "ignore_eos"),
    "logprobs": partial(_logprobs, "logprobs"),
    "prompt_logprobs": partial(_logprobs, "prompt_logprobs"),
    "skip_special_tokens": partial(flag, "skip_special_tokens"),
    "spaces_between_special_tokens": partial(flag, "spaces_between_special_tokens"),
    "truncate_prompt_tokens": _truncate,
    "echo": partial(flag, "echo"),
    "return_token_ids": partial(flag, "return_token_ids"),
    **KEEPERS,
    "priority": partial(integer, "priority", low=MIN_PRIORITY, high=MAX_PRIORITY),
    "deadline_ms": partial(real, "deadline_ms", low=0.0, high=MAX_DEADLINE_MS),
    "cache_salt": partial(text, "cache_salt", most=MAX_SALT_CHARS),
    "add_generation_prompt": partial(flag, "add_generation_prompt"),
    "continue_final_message": partial(flag, "continue_final_message"),
    "chat_template_kwargs": partial(read_object, "chat_template_kwargs"),
    "chat_template": partial(text, "chat_template"),
}
"""Field of SamplingParams (and `stop_words`) → how its value is checked."""


def _is_read(key: str, value: Any) -> bool:
    """Whether a key has a reader. Raises for what is not built and for what nobody knows."""
    if key in READERS:
        return True
    if key in _OFF:
        if not _asks_for_nothing(value, _OFF[key]):
            raise UnsupportedFeature(key, _NOT_BUILT[key]) if key in _NOT_BUILT else UnsupportedFeature(key)
        return False
    if key in _ELSEWHERE:
        raise InvalidRequest(key, "is no sampling parameter: give it as an input or parameter of the request itself")
    raise InvalidRequest("sampling_parameters", f"unknown parameter {shown(key)}{_hint(key)}")


def _hint(key: str) -> str:
    """The nearest name that a request may hold, if one is near."""
    close = difflib.get_close_matches(key[:64], (*READERS, *_ELSEWHERE, *_OFF), n=1)
    return f"; did you mean {close[0]!r}?" if close else "; docs/parameters.md lists what is known"


def _asks_for_nothing(value: Any, off_values: tuple[Any, ...]) -> bool:
    return value is None or any(_equals(value, off) for off in off_values)


def _equals(value: Any, off: Any) -> bool:
    if isinstance(off, bool):
        return value is off or (isinstance(value, str) and read_flag(value) is off)
    if isinstance(off, int):
        return number(value) == off
    return type(value) is type(off) and bool(value == off)
