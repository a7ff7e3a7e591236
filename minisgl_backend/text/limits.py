"""What this engine takes: the bounds that a request is checked against.

Where it stands in the flow: made by the text actor when an engine group is ready, read by `text/request.py` and
`text/prompt.py`. The bounds on what is kept until an answer is sent are the same in every engine: without them a small
request has the host, and then the stub, hold gigabytes.
"""

from __future__ import annotations

import msgspec

from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import InvalidRequest
from minisgl_backend.text.parameters import SamplingParams

MAX_KEPT_LOGPROBS = 1 << 18  # tokens of answers that are not streamed, each with the best ones beside it: 20 MB of JSON
MAX_ECHOED_CHARS = 1 << 25  # of a prompt in front of several answers, together


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one sequence may hold, in tokens, and what the operator lets a client decide."""

    context_tokens: int  # prompt + answer
    pool_tokens: int  # the whole KV pool: what one sequence alone could fill
    allow_client_template: bool = False  # a chat may bring a template of its own
    allow_control_tokens: bool = False  # the texts of control tokens in a chat are control tokens
    priorities: bool = False  # the waiting queue goes by them: the policy is `priority`
    sequences: int = 1 << 20  # open at a time; a request has n of them
    reasoning_parser: str = ""  # of the model; empty: none
    tool_parser: str = ""
    defaults: SamplingParams = SamplingParams()  # where a request says nothing

    @property
    def sequence_tokens(self) -> int:
        """C of the length rule."""
        return min(self.context_tokens, self.pool_tokens)

    @property
    def prompt_tokens(self) -> int:
        """The longest prompt that leaves room for an answer."""
        return self.sequence_tokens - 1

    @property
    def bound(self) -> str:
        """Which of the two is the smaller, in words."""
        return "context" if self.context_tokens <= self.pool_tokens else "KV pool"


def limits_of(
    config: EngineConfig, context_tokens: int, pool_tokens: int, parsers: tuple[str, str], defaults: SamplingParams
) -> RequestLimits:
    """Of an engine that is up. parsers: of reasoning and of tools (`text/parsing.py`)."""
    reasoning, tools = parsers
    return RequestLimits(
        context_tokens=context_tokens,
        pool_tokens=pool_tokens,
        allow_client_template=config.allow_client_template,
        allow_control_tokens=config.allow_control_tokens,
        priorities=config.policy == "priority",
        sequences=config.queue_limit + config.max_running,
        reasoning_parser=reasoning,
        tool_parser=tools,
        defaults=defaults,
    )


def refuse_kept_logprobs(logprobs: int | None, n: int, max_new_tokens: int) -> None:
    """Whether those of n answers of so many tokens can be kept until all have ended. Raises InvalidRequest."""
    tokens = n * max_new_tokens
    if logprobs is None or tokens * (1 + logprobs) <= MAX_KEPT_LOGPROBS:
        return
    most = MAX_KEPT_LOGPROBS // tokens - 1
    if most < 0:
        says = f"are told of at most {MAX_KEPT_LOGPROBS} tokens of answers that are not streamed"
        raise InvalidRequest("logprobs", f"{says}, n * max_tokens = {tokens}")
    says = f"must be at most {most} when n * max_tokens = {tokens} and the answer is not streamed"
    raise InvalidRequest("logprobs", f"{says}, got {logprobs}")


def refuse_echoes(prompt: str, n: int) -> None:
    """Whether the prompt can stand in front of each of n answers; of one it always can. Raises InvalidRequest."""
    if n > 1 and n * len(prompt) > MAX_ECHOED_CHARS:
        says = f"would put {len(prompt)} characters in front of each of {n} answers, at most {MAX_ECHOED_CHARS} in all"
        raise InvalidRequest("echo", f"{says} are taken; exclude_input_in_output without echo puts none there")
