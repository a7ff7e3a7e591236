"""The choices of /v1/completions. A delta of a stream and a whole choice have the same shape."""

from __future__ import annotations

from typing import Any

from minisgl_client.gateway.logprobs import Columns, joined
from minisgl_client.gateway.mapping import Plan
from minisgl_client.gateway.replies import samples_of
from minisgl_client.pieces import Piece, Sample


class CompletionTeller:
    """A `Teller`."""

    object_ = "text_completion"
    chunk = "text_completion"

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        places, top = len(plan.prompts) * plan.n, plan.top_logprobs
        self._columns = [] if top is None else [Columns(top) for _ in range(places)]
        self._ended = [False] * places
        self._fronts = [text if plan.told_here else "" for text in plan.echoed for _ in range(plan.n)]  # not told yet

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
        first, samples = prompt * self._plan.n, samples_of(piece)
        if self._plan.unanswered:
            samples = (Sample("", "length", None, None),) * len(samples)
        return [self._choice(prompt, first + place, sample, piece) for place, sample in enumerate(samples)]

    def _choice(self, prompt: int, index: int, sample: Sample, piece: Piece) -> dict[str, Any]:
        logprobs = self._logprobs(prompt, index, sample, piece)
        text = sample.text
        if self._fronts:
            text, self._fronts[index] = self._fronts[index] + text, ""
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": sample.finish_reason}
        if self._plan.token_ids:
            choice["token_ids"] = list(sample.output_ids or ())
            if piece.prompt_ids is not None:
                choice["prompt_token_ids"] = list(piece.prompt_ids)
        return choice

    def _logprobs(self, prompt: int, index: int, sample: Sample, piece: Piece) -> dict[str, Any] | None:
        if not self._columns:
            return None
        columns = self._columns[index]
        if not self._plan.echoed or piece.prompt_logprobs is None:
            return columns.of_answer(sample.logprobs or ())
        of_prompt = columns.of_prompt(piece.prompt_logprobs, self._plan.echoed[prompt])
        return joined(of_prompt, columns.of_answer(sample.logprobs or ()))


def _is_news(choice: dict[str, Any]) -> bool:
    has_logprobs = bool(choice["logprobs"] and choice["logprobs"]["tokens"])
    return bool(choice["text"] or choice["finish_reason"] or has_logprobs or choice.get("token_ids"))
