"""The pieces of an answer → the objects of OpenAI's API, whole or in chunks. Pure; one Reply a request.

pieces ─► Reply.choices ─► Reply.chunks   a stream
                        └► Reply.whole    the answer in one object
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from minisgl_client.gateway.mapping import Plan
from minisgl_client.pieces import Piece, Sample, Usage, total


def samples_of(piece: Piece) -> tuple[Sample, ...]:
    """All answers of a piece, also where there is one."""
    if piece.samples:
        return piece.samples
    told = (piece.text, piece.finish_reason, piece.output_ids, piece.logprobs, piece.reasoning, piece.tool_calls)
    return (Sample(*told, piece.cumulative_logprob),)


class Teller(Protocol):
    """What the endpoints differ in."""

    object_: str  # of the whole answer
    chunk: str  # of a part of a stream

    def opening(self) -> list[dict[str, Any]]: ...  # choices that come before all others in a stream

    def deltas(self, prompt: int, piece: Piece) -> list[dict[str, Any]]: ...  # choices of a stream that have news

    def choices(self, prompt: int, piece: Piece) -> list[dict[str, Any]]: ...  # of a piece that is a whole answer


class Reply:
    """What has been told of one request, and what it cost."""

    def __init__(self, plan: Plan, teller: Teller, *, id: str, model: str, created: int) -> None:
        """created: seconds since 1970."""
        self._plan = plan
        self._teller = teller
        self._head = {"id": id, "object": teller.chunk, "created": created, "model": model}
        self._usages: list[Usage] = [Usage()] * len(plan.prompts)
        self.finish_reasons: list[str | None] = [None] * (len(plan.prompts) * plan.n)

    def opening(self) -> list[dict[str, Any]]:
        """The chunks with which a stream begins."""
        return self._chunks(self._teller.opening())

    def chunks(self, prompt: int, piece: Piece) -> list[dict[str, Any]]:
        """Of a piece of a stream."""
        self._count(prompt, piece)
        return self._chunks(self._teller.deltas(prompt, piece))

    def closing(self) -> list[dict[str, Any]]:
        """The chunks with which it ends."""
        return [{**self._head, "choices": [], "usage": self.usage()}] if self._plan.usage_at_end else []

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """pieces: by prompt, each a whole answer."""
        choices: list[dict[str, Any]] = []
        for prompt, piece in enumerate(pieces):
            self._count(prompt, piece)
            choices += self._noted(self._teller.choices(prompt, piece))
        return {**self._head, "object": self._teller.object_, "choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """In tokens, so far; prompts and answers of all prompts."""
        prompt = sum(usage.input_tokens or 0 for usage in self._usages)
        completion = 0 if self._plan.unanswered else sum(usage.output_tokens or 0 for usage in self._usages)
        cached = sum(usage.cached_tokens or 0 for usage in self._usages)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _count(self, prompt: int, piece: Piece) -> None:
        self._usages[prompt] = total([self._usages[prompt], piece.usage])

    def _chunks(self, choices: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        usage: dict[str, Any] = {}
        if self._plan.usage_in_all:
            usage = {"usage": self.usage()}
        elif self._plan.usage_at_end:
            usage = {"usage": None}
        return [{**self._head, "choices": [choice], **usage} for choice in self._noted(choices)]

    def _noted(self, choices: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        for choice in choices:
            if choice["finish_reason"] is not None:
                self.finish_reasons[choice["index"]] = choice["finish_reason"]
        return choices
