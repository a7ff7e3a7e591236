"""The Triton model `parrot`: speaks as much of `minisgl`'s dialect as `summarise` asks for, and does what a part says.

Copied into a model repository by tests of `summarise` on the real server. A part is its first line:

    say WORD            the answer is " WORD", in one slice
    after WORD OTHER    as `say OTHER`, but not before WORD was asked for
    go on               every slice is full, for ever
    fail WORD OTHER     refused, but not before WORD was asked for
"""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

WAIT_S = 120.0


class TritonPythonModel:
    """Decoupled."""

    def initialize(self, args: dict[str, str]) -> None:
        self._changed = threading.Condition()
        self._asked: set[str] = set()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            inputs = {tensor.name(): tensor.as_numpy().reshape(-1)[0] for tensor in request.inputs()}
            words = inputs["text_input"].decode().split("Text:\n")[1].split("\n")[0].split()
            max_tokens = json.loads(inputs["sampling_parameters"])["max_tokens"]
            sender = request.get_response_sender()
            threading.Thread(target=self._answer, args=(sender, words, max_tokens), daemon=True).start()

    def _answer(self, sender: Any, words: list[str], max_tokens: int) -> None:
        with self._changed:
            self._asked.add(words[-1])
            self._changed.notify_all()
            if words[0] in ("after", "fail"):
                assert self._changed.wait_for(lambda: words[1] in self._asked, WAIT_S)
        if words[0] == "fail":
            error = pb_utils.TritonError(f"top_k: refused by {words[-1]}", pb_utils.TritonError.INVALID_ARG)
            response = pb_utils.InferenceResponse([], error)
        elif words[0] == "go":
            response = said(" on", "length", max_tokens)
        else:
            response = said(f" {words[-1]}", "stop", 2)
        sender.send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def said(text: str, reason: str, tokens: int) -> Any:
    """One response."""
    strings = {"text_output": text.encode(), "finish_reason": reason.encode()}
    tensors = [pb_utils.Tensor(name, np.array([value], dtype=np.object_)) for name, value in strings.items()]
    return pb_utils.InferenceResponse(
        [*tensors, pb_utils.Tensor("num_output_tokens", np.array([tokens], dtype=np.uint32))]
    )
