"""The choices of /v1/chat/completions: messages, and the deltas of which a client makes them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from minisgl_client.gateway.forced import CallReader
from minisgl_client.gateway.logprobs import of_chat
from minisgl_client.gateway.mapping import Plan
from minisgl_client.gateway.replies import samples_of
from minisgl_client.pieces import Piece, Sample, ToolCall, whole_calls


def new_call_id() -> str:
    """Of one call of a tool."""
    return f"call_{uuid.uuid4().hex[:24]}"


class ChatTeller:
    """A `Teller`. new_id: of each call of a tool."""

    object_ = "chat.completion"
    chunk = "chat.completion.chunk"

    def __init__(self, plan: Plan, new_id: Callable[[], str] = new_call_id) -> None:
        self._plan = plan
        self._new_id = new_id
        self._readers = [CallReader(plan.forced) for _ in range(plan.n)] if plan.forced else []
        self._called = [False] * plan.n
        self._ended = [False] * plan.n

    def opening(self) -> list[dict[str, Any]]:
        """Who speaks."""
        delta = {"role": "assistant", "content": ""}
        return [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} for index in range(self._plan.n)
        ]

    def deltas(self, prompt: int, piece: Piece) -> list[dict[str, Any]]:
        """Of answers that say something new."""
        told = [self._delta(index, sample, piece) for index, sample in enumerate(samples_of(piece))]
        news = [choice for choice in told if not self._ended[choice["index"]] and _is_news(choice)]
        for choice in news:
            self._ended[choice["index"]] = choice["finish_reason"] is not None
        return news

    def choices(self, prompt: int, piece: Piece) -> list[dict[str, Any]]:
        """Of all answers."""
        return [self._whole(index, sample, piece) for index, sample in enumerate(samples_of(piece))]

    def _delta(self, index: int, sample: Sample, piece: Piece) -> dict[str, Any]:
        text, calls = self._parts(index, sample)
        delta: dict[str, Any] = {}
        if text:
            delta["content"] = text
        if sample.reasoning:
            delta["reasoning_content"] = sample.reasoning
        if calls:
            delta["tool_calls"] = [self._call_delta(call) for call in whole_calls(calls)]
        return self._choice(index, "delta", delta, sample, piece)

    def _whole(self, index: int, sample: Sample, piece: Piece) -> dict[str, Any]:
        text, calls = self._parts(index, sample)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if sample.reasoning:
            message["reasoning_content"] = sample.reasoning
        if calls:
            message["tool_calls"] = [
                {"id": self._new_id(), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in whole_calls(calls)
            ]
        return self._choice(index, "message", message, sample, piece)

    def _choice(self, index: int, part: str, content: dict[str, Any], sample: Sample, piece: Piece) -> dict[str, Any]:
        """With the true reason: an answer that was cut within a call has the length's."""
        reason = sample.finish_reason
        if reason == "stop" and self._called[index]:
            reason = "tool_calls"
        top = self._plan.top_logprobs
        logprobs = of_chat(sample.logprobs or (), top) if top is not None else None
        choice = {"index": index, part: content, "logprobs": logprobs, "finish_reason": reason}
        if self._plan.token_ids:
            choice["token_ids"] = list(sample.output_ids or ())
            if piece.prompt_ids is not None:
                choice["prompt_token_ids"] = list(piece.prompt_ids)
        return choice

    def _parts(self, index: int, sample: Sample) -> tuple[str, Sequence[ToolCall]]:
        """The content, and calls or their deltas."""
        text, calls = sample.text, list(sample.tool_calls)
        if self._readers:
            text, calls = "", self._readers[index].read(sample.text)
        if self._plan.one_call:
            calls = [call for call in calls if call.index == 0]
        self._called[index] |= bool(calls)
        return text, calls

    def _call_delta(self, call: ToolCall) -> dict[str, Any]:
        if call.name:
            function = {"name": call.name, "arguments": call.arguments}
            return {"index": call.index, "id": self._new_id(), "type": "function", "function": function}
        return {"index": call.index, "function": {"arguments": call.arguments}}


def _is_news(choice: dict[str, Any]) -> bool:
    has_logprobs = bool(choice["logprobs"] and choice["logprobs"]["content"])
    return bool(choice["delta"] or choice["finish_reason"] or has_logprobs or choice.get("token_ids"))
