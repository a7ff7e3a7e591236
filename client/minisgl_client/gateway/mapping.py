"""A body of OpenAI's API → what the engine is asked, and how its answers are told. Pure.

    CompletionBody ─► plan_completion ─┐
                                       ├─► Plan ─► Backends (what is asked) and completions.py, chats.py (what is told)
    ChatBody ───────► plan_chat ───────┘

The engine has the names of vLLM, so most fields go to it as they are. It has the ranges, too: what it refuses is told
under the name that the client used (`Plan.names`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from minisgl_client.gateway.errors import refused
from minisgl_client.gateway.fields import Body, ChatBody, CompletionBody
from minisgl_client.gateway.forced import forced_form
from minisgl_client.requests import SamplingFields

MAX_PROMPTS = 128
"""Of one request: each is a request of the engine's."""

MAX_N = 128
"""As the engine has it: what is kept of answers is laid out before it is asked."""

_ALL_THAT_FITS = 2**31 - 1  # of max_tokens: the engine clips it to what the context leaves
_SAMPLING = frozenset(get_type_hints(SamplingFields)) - {"logprobs", "max_tokens"}  # these two mean something else here
_COMPLETION_NAMES = {"text": "prompt", "text_input": "prompt", "input_ids": "prompt", "prompt_logprobs": "logprobs"}
_SGLANG = {"regex": "guided_regex", "ebnf": "guided_grammar", "no_stop_trim": "include_stop_str_in_output"}
"""Its name → the engine's."""

_FORMS = (
    *("response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf"),
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one request of the API comes to."""

    prompts: Sequence[Mapping[str, Any]]  # arguments of AsyncClient.stream; choices go on from one to the next
    n: int  # answers to each
    stream: bool
    usage_at_end: bool
    usage_in_all: bool
    names: Mapping[str, str]  # the engine's field → the client's
    top_logprobs: int | None = None  # best tokens at each place; None: no logprobs
    token_ids: bool = False
    echoed: Sequence[str] = ()  # the texts that stand in front of the answers, by prompt; none: no echo
    told_here: bool = False  # the gateway puts them there: with what the engine tells they do not come
    unanswered: bool = False  # these texts are all that is told (max_tokens 0), and not the token that is asked for
    parses: bool = False  # a chat: reasoning and calls are taken apart, where the model has a parser
    tools: bool = False  # and it may call them as it is used to
    forced: Sequence[str] = ()  # functions one of which it must call
    one_call: bool = False  # of an answer, more are not told

    def names_of(self, place: int) -> dict[str, str]:
        """`names`, for one of several prompts, which is told by its place."""
        return {ours: f"prompt[{place}]" if theirs == "prompt" else theirs for ours, theirs in self.names.items()}


def ids_to_echo(body: CompletionBody) -> list[list[int]]:
    """Prompts of token ids whose texts an echo needs: the engine puts none in front of these. Raises ApiError."""
    ids = [prompt["input_ids"] for prompt in _prompts(body.prompt) if "input_ids" in prompt] if body.echo else []
    if ids and body.truncate_prompt_tokens is not None:
        raise refused("truncate_prompt_tokens", "can not be given together with echo and a prompt of token ids")
    return ids


def plan_completion(body: CompletionBody, texts_of_ids: Sequence[str] = ()) -> Plan:
    """texts_of_ids: those of `ids_to_echo`. Raises ApiError."""
    prompts = _prompts(body.prompt)
    sampling = _sampling(body)
    if body.max_tokens is not None:
        sampling["max_tokens"] = body.max_tokens
    if body.logprobs is not None:
        sampling["logprobs"] = body.logprobs
    texts = [prompt["text"] for prompt in prompts if "text" in prompt] or texts_of_ids
    if body.echo:
        if body.truncate_prompt_tokens is not None and (body.logprobs is not None or body.max_tokens == 0):
            raise refused("truncate_prompt_tokens", "what is left of a text is not known: not with an echo's logprobs")
        if body.logprobs is not None:
            sampling["prompt_logprobs"] = body.logprobs
    unanswered = bool(body.echo) and body.max_tokens == 0
    if unanswered:  # an engine gives one token at least
        sampling["max_tokens"] = 1
    told_here = bool(body.echo) and (unanswered or bool(texts_of_ids))
    if told_here:
        sampling["echo"] = False
    return Plan(
        prompts=[{**prompt, **sampling} for prompt in prompts],
        names=_names(body, _COMPLETION_NAMES),
        top_logprobs=body.logprobs,
        echoed=texts if body.echo else (),
        told_here=told_here,
        unanswered=unanswered,
        **_common(body),
    )


def plan_chat(body: ChatBody) -> Plan:
    """Raises ApiError."""
    sampling = _sampling(body)
    limit, length = _max_tokens(body)
    sampling["max_tokens"] = limit
    top_logprobs = _top_logprobs(body)
    if top_logprobs is not None:
        sampling["logprobs"] = top_logprobs
    fields: dict[str, Any] = {"messages": [plain_message(message) for message in body.messages], **sampling}
    names = _names(body, {"max_tokens": length, "logprobs": "top_logprobs", "parse_output": "response_format"})
    choice, forced = _choice(body)
    if choice != "none":
        fields["tools"] = [_tool(tool) for tool in body.tools or ()]
    if forced:
        if given := [name for name in _FORMS if getattr(body, name) not in (None, {"type": "text"})]:
            raise refused("tool_choice", f"that a function must be called does not go together with {given[0]}")
        fields.pop("response_format", None)
        several = choice == "required" and body.parallel_tool_calls is not False
        fields["structured_outputs"] = {"structural_tag": forced_form(forced, several=several)}
        names["structured_outputs"] = "tools"
    return Plan(
        prompts=[fields],
        names=names,
        top_logprobs=top_logprobs,
        parses=not forced,
        tools=choice == "auto",
        forced=[tool["function"]["name"] for tool in forced],
        one_call=body.parallel_tool_calls is False,
        **_common(body),
    )


def _common(body: Body) -> dict[str, Any]:
    options = body.stream_options
    if options is not None and not body.stream:
        raise refused("stream_options", "is of a stream: it needs stream: true")
    everywhere = bool(options and options.continuous_usage_stats)
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MAX_N:
        raise refused("n", f"must be an integer from 1 to {MAX_N}, got {n}")
    return {
        "n": n,
        "stream": bool(body.stream),
        "usage_at_end": bool(options and options.include_usage),
        "usage_in_all": everywhere,
        "token_ids": bool(body.return_token_ids),
    }


def _sampling(body: Body) -> dict[str, Any]:
    """The fields that go to the engine as they are."""
    values = ((name, getattr(body, name)) for name in body.__struct_fields__ if name in _SAMPLING)
    sampling = {name: value for name, value in values if value is not None}
    for theirs, ours in _SGLANG.items():
        if (value := getattr(body, theirs)) is None:
            continue
        if ours in sampling:
            raise refused(theirs, f"is another name of {ours}: give one of them")
        sampling[ours] = value
    return sampling


def _names(body: Body, names: Mapping[str, str]) -> dict[str, str]:
    """Those of an endpoint, and of what this body says by another name."""
    return {**names, **{ours: theirs for theirs, ours in _SGLANG.items() if getattr(body, theirs) is not None}}


def _prompts(prompt: Any) -> list[dict[str, Any]]:
    """A string, token ids, or a list of strings and lists of ids."""
    if isinstance(prompt, str):
        return [{"text": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise refused("prompt", "must be a string, a list of token ids, or a list of one of these, not empty")
    if _are_ids(prompt):
        return [{"input_ids": prompt}]
    if len(prompt) > MAX_PROMPTS:
        raise refused("prompt", f"must hold at most {MAX_PROMPTS} prompts, got {len(prompt)}")
    if all(isinstance(one, str) for one in prompt):
        return [{"text": one} for one in prompt]
    if all(isinstance(one, list) and _are_ids(one) for one in prompt):
        if [] in prompt:
            raise refused(f"prompt[{prompt.index([])}]", "must not be empty")
        return [{"input_ids": one} for one in prompt]
    raise refused("prompt", "must hold strings only, token ids only, or lists of token ids only", "invalid_type")


def _are_ids(values: Sequence[Any]) -> bool:
    return all(type(value) is int for value in values)


def _max_tokens(body: ChatBody) -> tuple[int, str]:
    """The limit, and the name that the client used for it. None given: all that the context leaves."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise refused("max_completion_tokens", f"is {new} and max_tokens is {old}: give one of them")
    if new is not None:
        return new, "max_completion_tokens"
    return _ALL_THAT_FITS if old is None else old, "max_tokens"


def _top_logprobs(body: ChatBody) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise refused("top_logprobs", "needs logprobs: true")
    return None


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """As templates know it: OpenAI's clients write members without a value, and "developer" for "system"."""
    plain = {name: value for name, value in message.items() if value is not None or name == "content"}
    if plain.get("role") == "developer":
        plain["role"] = "system"
    return plain


def _choice(body: ChatBody) -> tuple[str, list[dict[str, Any]]]:
    """ "none", "auto", "required" or "named", and the functions one of which must be called."""
    tools, choice = body.tools or [], body.tool_choice
    for place, tool in enumerate(tools):
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            raise refused(f"tools[{place}]", 'must be an object with `type` "function" and a `function` with a name')
    if choice is None:
        choice = "auto" if tools else "none"
    if choice not in ("none", "auto", "required") and not isinstance(choice, dict):
        raise refused("tool_choice", 'must be "none", "auto", "required" or an object that names a function')
    if choice != "none" and not tools:
        raise refused("tool_choice", "needs tools")
    if not isinstance(choice, dict):
        return choice, list(tools) if choice == "required" else []
    named = choice.get("function")
    name = named.get("name") if isinstance(named, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise refused("tool_choice", 'must be {"type": "function", "function": {"name": …}} where it is an object')
    found = [tool for tool in tools if tool["function"]["name"] == name]
    if not found:
        raise refused("tool_choice", f"names {name!r}, which is not among the tools")
    return "named", found[:1]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """For the template: without what is said to the API alone."""
    return {**tool, "function": {name: value for name, value in tool["function"].items() if name != "strict"}}
