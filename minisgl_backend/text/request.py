"""A client's request → a prompt that the scheduler may trust, or a refusal that names the field.

Where it stands in the flow: the text actor calls `check_request` when a request arrives (cheap: microseconds plus
one pass over the bytes) and `tokenise` next, for long prompts in a thread. Both are pure apart from `draw_seed` and
share nothing that changes, so any number may run at once. What passes here can not raise in the scheduler or a worker.

The length rule. Let L be the tokens of the prompt and C the smaller of the context and the KV pool, in tokens.
A prompt needs L + 1 <= C: it has room for one token of answer. An answer has at most C - L tokens, so `max_tokens` is
clipped to that and the answer then ends with finish_reason `length`. L = C - 1 with max_tokens = 1 always works.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from minisgl_backend.errors import InvalidRequest
from minisgl_backend.messages.client import Request
from minisgl_backend.messages.engine import Sequence
from minisgl_backend.messages.ids import SequenceId
from minisgl_backend.messages.sampling import Sampling
from minisgl_backend.messages.tokens import count_tokens, pack_tokens
from minisgl_backend.text.parameters import SamplingParams, parse_parameters, resolve_sampling
from minisgl_backend.text.tokenizer import Tokenizer


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one sequence may hold, in tokens."""

    context_tokens: int  # prompt + answer
    pool_tokens: int  # the whole KV pool: what one sequence alone could fill

    @property
    def sequence_tokens(self) -> int:
        """C of the length rule."""
        return min(self.context_tokens, self.pool_tokens)

    @property
    def prompt_tokens(self) -> int:
        """The longest prompt that leaves room for an answer."""
        return self.sequence_tokens - 1


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """A request whose fields are right, its prompt not yet tokenised."""

    prompt_text: str
    params: SamplingParams
    stream: bool
    echo_prompt: bool  # the prompt stands in front of the text of the answer


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """A request that will run."""

    prompt_ids: bytes  # packed int32, 1 … RequestLimits.prompt_tokens ids, each below the vocabulary's size
    prompt_text: str  # as the client gave it
    sampling: Sampling
    max_new_tokens: int  # ≥ 1, clipped by the length rule
    stop_token_ids: tuple[int, ...]  # sorted; empty with ignore_eos
    stream: bool
    echo_prompt: bool

    @property
    def num_input_tokens(self) -> int:
        return count_tokens(self.prompt_ids)

    def sequence(self, sequence_id: SequenceId) -> Sequence:
        """What the scheduler gets of it."""
        return Sequence(
            id=sequence_id,
            prompt=self.prompt_ids,
            sampling=self.sampling,
            max_new_tokens=self.max_new_tokens,
            stop_token_ids=self.stop_token_ids,
        )


def check_request(request: Request, tokenizer: Tokenizer, limits: RequestLimits) -> Checked:
    """All that can be said of a request without tokenising it.

    Raises InvalidRequest or UnsupportedFeature, naming the field.
    """
    params = parse_parameters(request.parameters)
    if request.stream and request.exclude_input_in_output is False:
        raise InvalidRequest("exclude_input_in_output", "must not be false when stream is true")
    return Checked(
        prompt_text=_prompt_text(request.text_input or b"", tokenizer, limits),
        params=params,
        stream=request.stream,
        echo_prompt=not request.stream and not request.exclude_input_in_output,
    )


def tokenise(checked: Checked, tokenizer: Tokenizer, limits: RequestLimits, draw_seed: Callable[[], int]) -> Accepted:
    """Encodes the prompt and applies the length rule. Slow for long prompts: may run in a thread.

    draw_seed: gives 0 … 2**63 - 1; called once, and only when the request names no seed.
    Raises InvalidRequest naming `text_input`.
    """
    prompt = _prompt_ids(checked.prompt_text, tokenizer, limits)
    params = checked.params
    seed = draw_seed() if params.seed is None else params.seed
    return Accepted(
        prompt_ids=pack_tokens(prompt),
        prompt_text=checked.prompt_text,
        sampling=resolve_sampling(params, tokenizer.vocab_size, seed),
        max_new_tokens=min(params.max_tokens, limits.sequence_tokens - len(prompt)),
        stop_token_ids=() if params.ignore_eos else tokenizer.eos_token_ids,
        stream=checked.stream,
        echo_prompt=checked.echo_prompt,
    )


def _prompt_text(raw: bytes, tokenizer: Tokenizer, limits: RequestLimits) -> str:
    if not raw:
        raise InvalidRequest("text_input", "must not be empty")
    most = limits.prompt_tokens * tokenizer.max_token_bytes
    if len(raw) > most:  # before anything that walks over the text
        raise InvalidRequest(
            "text_input",
            f"holds {len(raw)} bytes; no prompt of more than {most} bytes fits the limit of "
            f"{limits.prompt_tokens} prompt tokens",
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest("text_input", f"is not valid UTF-8: {error.reason} at byte {error.start}") from None


def _prompt_ids(text: str, tokenizer: Tokenizer, limits: RequestLimits) -> list[int]:
    try:
        ids = tokenizer.encode(text)
    except Exception as error:  # the tokenizers package raises bare Exception, and only for what it can not encode
        raise InvalidRequest("text_input", f"can not be tokenised: {ascii(str(error))[:200]}") from None
    if not ids:
        raise InvalidRequest("text_input", "holds nothing that the model's tokenizer knows")
    if len(ids) > limits.prompt_tokens:
        bound = "context" if limits.context_tokens <= limits.pool_tokens else "KV pool"
        raise InvalidRequest(
            "text_input",
            f"holds {len(ids)} tokens; the {bound} of {limits.sequence_tokens} tokens takes prompts of at most "
            f"{limits.prompt_tokens}",
        )
    if max(ids) >= tokenizer.vocab_size:
        raise InvalidRequest(
            "text_input", f"holds the token {max(ids)}, which the model does not have (it has {tokenizer.vocab_size})"
        )
    return ids
