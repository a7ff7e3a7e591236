"""The bodies of requests: bytes → checked structures, or a refusal that names the field.

A field is read; or it is OpenAI's and can not change an answer here, and is passed over; or it would change one and is
refused unless its value asks for nothing; or nobody knows it, and it is refused with the nearest known name. Types are
checked here, ranges by the engine, which has them. docs/openai.md is the table of all.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from minisgl_backend.text.chat import MAX_MESSAGES_BYTES
from minisgl_client.gateway.errors import ApiError, refused


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream tells beside the answer."""

    include_usage: bool | None = None  # a last chunk with the usage
    continuous_usage_stats: bool | None = None  # and each chunk with the usage so far
    include_obfuscation: bool | None = None  # of no effect: chunks are not padded


class AnyBody(msgspec.Struct, frozen=True, kw_only=True):
    """What all endpoints read. null is the same as not given."""

    model: str | None = None


class Body(AnyBody, frozen=True, kw_only=True):
    """What both endpoints with an answer read. Names and meanings are OpenAI's, then vLLM's."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    response_format: dict[str, Any] | None = None
    # vLLM's
    min_tokens: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    # SGLang's
    regex: str | None = None
    ebnf: str | None = None
    no_stop_trim: bool | None = None
    deadline_ms: float | None = None  # ours: from arrival to the end of the answer


class CompletionBody(Body, frozen=True, kw_only=True):
    """Of /v1/completions."""

    prompt: Any  # a string, token ids, or a list of one of these
    echo: bool | None = None
    logprobs: int | None = None


class ChatBody(Body, frozen=True, kw_only=True):
    """Of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    # vLLM's
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


NO_EFFECT = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prediction"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    )
)
"""OpenAI's: bookkeeping, and speed."""

REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "suffix": (("",), "this server completes at the end only"),
    "best_of": ((1,), "there is no choice among answers; n gives several"),
    "audio": ((), "answers are text"),
    "modalities": ((["text"],), "answers are text"),
    "function_call": ((), "was replaced by tool_choice"),
    "functions": ((), "was replaced by tools"),
    "reasoning_effort": ((), "give what the model's template knows in chat_template_kwargs"),
    "verbosity": ((), "give what the model's template knows in chat_template_kwargs"),
    "web_search_options": ((), "this server searches nothing"),
    "moderation": ((), "this server does not moderate"),
    "prompt_logprobs": ((), "ask /v1/completions with echo and logprobs"),
    "use_beam_search": ((False,), "there is no beam search"),
    "length_penalty": ((1,), "there is no beam search"),
    "early_stopping": ((False,), "there is no beam search"),
    "logits_processors": (([],), "code that a request names is not run"),
    "include_reasoning": ((True,), "it is told where there is some"),
    "separate_reasoning": ((True,), "it is told apart where there is some"),
    "stream_reasoning": ((True,), "a stream tells it as it comes"),
    "lora_path": ((), "there are no adapters"),
    "return_tokens_as_token_ids": ((False,), "return_token_ids gives the ids"),
}
"""Known, and would change the answer → the values that ask for nothing, and the reason. null asks for nothing."""

Struct = TypeVar("Struct", bound=AnyBody)


def read_body(raw: bytes, kind: type[Struct]) -> Struct:
    """Raises ApiError (400). Messages that the engine would refuse for their size are refused before they are read: it
    would take a second, in which nobody is served.
    """
    try:
        if len(raw) > MAX_MESSAGES_BYTES:
            _refuse_long_messages(raw)
        members = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(members, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    known = kind.__struct_fields__
    given = {name: value for name, value in members.items() if name in known or not _is_off(name, value, known)}
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _of_wrong_type(str(error)) from None


def _refuse_long_messages(raw: bytes) -> None:
    """By their bytes as they were sent. What is no object is refused by whoever reads it."""
    try:
        messages = msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).get("messages", b"")
    except msgspec.ValidationError:
        return
    if (size := len(memoryview(messages))) > MAX_MESSAGES_BYTES:
        raise refused("messages", f"must hold at most {MAX_MESSAGES_BYTES} bytes, got {size}")


def _is_off(name: str, value: Any, known: tuple[str, ...]) -> bool:
    """True for a field that nobody reads and that asks for nothing; any other is refused."""
    if name in NO_EFFECT:
        return True
    if name in REFUSED:
        off, reason = REFUSED[name]
        if value is None or any(value == one and type(value) is type(one) for one in off):
            return True
        raise refused(name, f"is not supported: {reason}", "unsupported")
    near = difflib.get_close_matches(name[:80], known, 1)  # it takes as long as the word is
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ApiError(400, f"unknown field {name[:80]!r}{hint}", param=name[:80], code="unknown_parameter")


def _of_wrong_type(words: str) -> ApiError:
    """msgspec's "Expected `int | null`, got `str` - at `$.n`"."""
    problem, _, place = words.partition(" - at `$")
    if not place:
        field = words.rpartition("field `")[2].rstrip("`")  # "Object missing required field `messages`"
        return refused(field, "is required", "missing_required_parameter")
    field = place.rstrip("`").removeprefix(".").replace("[...]", "")
    return refused(field, problem[0].lower() + problem[1:], "invalid_type")
