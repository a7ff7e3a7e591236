"""The choices of /v1/completions. A delta of a stream and a whole choice have the same shape."""

from __future__ import annotations

from typing import Any

from minisgl_client.gateway.logprobs import of_completion
from minisgl_client.gateway.mapping import Plan
from minisgl_client.gateway.replies import samples_of
from minisgl_client.pieces import Piece, Sample


class CompletionTeller:
    """A `Teller`."""

    object_ = "text_completion"
    chunk = "text_completion"

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        places = len(plan.prompts) * plan.n
        self._offsets = [0] * places  # of the text of the next token
        self._ended = [False] * places

    def opening(self) -> list[dict[str, Any]]:
        """Nothing comes before the text."""
        return []

    def deltas(self, prompt: int, piece: Piece) -> list[dict[str, Any]]:
        """Of answers that say something new."""
        told = self.choices(prompt, piece)
        news = [choice for choice in told if not self._ended[choice["index"]] and _is_news(choice)]
        for choice in news:
            self._ended[choice["index"]] = choice["finish_reason"] is not None
        return news

    def choices(self, prompt: int, piece: Piece) -> list[dict[str, Any]]:
        """Of all answers to a prompt."""
        first = prompt * self._plan.n
        return [self._choice(prompt, first + place, sample, piece) for place, sample in enumerate(samples_of(piece))]

    def _choice(self, prompt: int, index: int, sample: Sample, piece: Piece) -> dict[str, Any]:
        logprobs = self._logprobs(prompt, index, sample, piece)
        choice = {"index": index, "text": sample.text, "logprobs": logprobs, "finish_reason": sample.finish_reason}
        if self._plan.token_ids:
            choice["token_ids"] = list(sample.output_ids or ())
            if piece.prompt_ids is not None:
                choice["prompt_token_ids"] = list(piece.prompt_ids)
        return choice

    def _logprobs(self, prompt: int, index: int, sample: Sample, piece: Piece) -> dict[str, Any] | None:
        top = self._plan.top_logprobs
        if top is None:
            return None
        first = ""
        if self._plan.echoed and piece.prompt_logprobs is not None:
            others = sum(len(_own_text(entries)) for entries in piece.prompt_logprobs[1:] if entries)
            text = self._plan.echoed[prompt]
            first = text[: max(0, len(text) - others)]  # all that the other tokens leave: empty for a BOS
        entries = (*(piece.prompt_logprobs or ()), *(sample.logprobs or ()))
        told, self._offsets[index] = of_completion(entries, top, self._offsets[index], first)
        return told


def _own_text(entries: Any) -> str:
    return str(next(iter(entries.values())).decoded_token)


def _is_news(choice: dict[str, Any]) -> bool:
    has_logprobs = bool(choice["logprobs"] and choice["logprobs"]["tokens"])
    return bool(choice["text"] or choice["finish_reason"] or has_logprobs or choice.get("token_ids"))
