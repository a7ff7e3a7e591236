"""TensorRT-LLM's dialect: the inputs of its model `ensemble` → `messages.client.Request`, and its outputs.

Where it stands in the flow: the bridge of the model `ensemble` calls `read_tensorrt` for every request; the Form it
returns writes the responses. Names, types and meanings are those of the ensemble of TensorRT-LLM's Triton backend
(triton_backend/all_models/inflight_batcher_llm), older names among them. What it knows and this engine does not build
is refused unless its value asks for nothing; docs/triton.md is the table.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from minisgl_backend.errors import InvalidRequest, UnsupportedFeature
from minisgl_backend.messages.client import Request
from minisgl_backend.messages.ids import RequestId
from minisgl_backend.messages.tokens import count_tokens
from minisgl_backend.serving.arrays import Tensors, array_of, bool_of, bytes_of, elements_of, inputs_of, only, words_of
from minisgl_backend.serving.outputs import Told, strings
from minisgl_backend.serving.parameters import merge_timeout, read_parameters
from minisgl_backend.serving.triton import InferenceRequest
from minisgl_backend.text.parameters import (
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
)
from minisgl_backend.text.values import MAX_INT, integer, real

_WORDS = ("bad_words", "stop_words")
_PENALTIES = {
    "repetition_penalty": (MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    "presence_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": (-MAX_PENALTY, MAX_PENALTY),
}
_MIN_TOKENS = ("min_tokens", "min_length")  # new and old name of the same
_SEED = ("seed", "random_seed")
_INTEGERS = ("max_tokens", "end_id", "top_k", *_MIN_TOKENS)
_FLAGS = (
    "stream",
    "exclude_input_in_output",
    "return_log_probs",
    "return_num_input_tokens",
    "return_num_output_tokens",
)

_ONLY: dict[str, int] = {"beam_width": 1, "num_return_sequences": 1, "num_draft_tokens": 0}
"""INT32 inputs → the only value taken, which asks for nothing."""

_ONLY_FALSE = ("return_context_logits", "return_generation_logits", "return_perf_metrics", "use_draft_logits")
_ONLY_EMPTY = ("decoder_text_input", "embedding_bias_words")

_NO_EFFECT = {
    "pad_id": (np.int32, "INT32"),
    "length_penalty": (np.float32, "FP32"),
    "len_penalty": (np.float32, "FP32"),
}
"""Padding and the lengths of beams: without beams they change nothing in TensorRT-LLM either. Checked by type."""

_GUIDES = {
    "json": "json_object",
    "json_schema": "json",
    "regex": "regex",
    "ebnf_grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""`guided_decoding_guide_type` → the member of `structured_outputs` that takes the guide."""

_GUIDE = ("guided_decoding_guide_type", "guided_decoding_guide")

INPUTS = (
    "text_input",
    *_WORDS,
    "temperature",
    "top_p",
    *_PENALTIES,
    *_SEED,
    *_INTEGERS,
    *_FLAGS,
    *_ONLY,
    *_ONLY_FALSE,
    *_ONLY_EMPTY,
    *_NO_EFFECT,
    *_GUIDE,
)
"""The inputs that config.pbtxt declares."""


@dataclass(frozen=True)
class TensorRtForm:
    """Shapes as TensorRT-LLM's: [1] for the text, a batch of one in front of everything else."""

    log_probs: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False  # of each response

    @property
    def finish_reason(self) -> bool:
        return False

    @property
    def output_ids(self) -> bool:
        return False

    @property
    def logprobs(self) -> bool:
        return self.log_probs

    def arrays(self, told: Told) -> dict[str, Any]:
        (held,) = told.each
        outputs = {"text_output": strings([held.text.encode("utf-8")]), "batch_index": _ZERO, "sequence_index": _ZERO}
        if self.log_probs:
            own = [next(iter(entry.values()))["logprob"] for entry in json.loads(held.json) or ()]
            outputs["output_log_probs"] = np.array([[own]], dtype=np.float32)
            outputs["cum_log_probs"] = np.array([[held.logprob]], dtype=np.float32)
        if self.num_input_tokens and told.started is not None:
            outputs["num_input_tokens"] = np.array([[told.started.num_input_tokens]], dtype=np.int32)
        if self.num_output_tokens:
            outputs["num_output_tokens"] = np.array([[count_tokens(held.tokens)]], dtype=np.int32)
        return outputs


_ZERO = np.zeros((1, 1), dtype=np.int32)


def read_tensorrt(request: InferenceRequest, id: RequestId) -> tuple[Request, TensorRtForm]:
    """Copies everything out of Triton's memory. Raises RequestError, naming the field."""
    tensors = inputs_of(request, INPUTS)
    _refuse_not_built(tensors)
    flags = {name: bool_of(tensors, name) for name in _FLAGS}
    sampling, timeout_us = _of_parameters(request)
    sampling |= _lengths(tensors) | _draw(tensors) | _words(tensors) | _guide(tensors)
    if flags["return_log_probs"]:
        sampling["logprobs"] = 0
    exclude = flags["exclude_input_in_output"]
    message = Request(
        id=id,
        text_input=bytes_of(tensors, "text_input"),
        parameters=json.dumps(sampling).encode(),
        stream=flags["stream"] or False,
        exclude_input_in_output=True if exclude is None else exclude,
        timeout_us=timeout_us,
        return_cumulative_logprob=flags["return_log_probs"] or False,
    )
    form = TensorRtForm(
        log_probs=bool(flags["return_log_probs"]),
        num_input_tokens=bool(flags["return_num_input_tokens"]),
        num_output_tokens=bool(flags["return_num_output_tokens"]),
    )
    return message, form


def _refuse_not_built(tensors: Tensors) -> None:
    if "text_input" not in tensors:
        raise InvalidRequest("text_input", "is missing")
    for name, nothing in _ONLY.items():
        value = _scalar(tensors, name, np.int32, "INT32")
        if value not in (None, nothing):
            raise UnsupportedFeature(name, f"must be {nothing}, got {value}")
    for name in _ONLY_FALSE:
        if bool_of(tensors, name):
            raise UnsupportedFeature(name)
    for name in _ONLY_EMPTY:
        if any(elements_of(tensors, name)):
            raise UnsupportedFeature(name)
    for name, (dtype, triton_type) in _NO_EFFECT.items():
        _scalar(tensors, name, dtype, triton_type)


def _of_parameters(request: InferenceRequest) -> tuple[dict[str, Any], int]:
    """Of Triton's request parameters `priority` and `timeout` have a meaning here; its own pass."""
    parameters = read_parameters(request.parameters())
    for key in (*parameters.options, *parameters.sampling):
        if key != "priority":
            name = key if key.isascii() and key.isidentifier() and len(key) <= 64 else "parameters"
            raise UnsupportedFeature(name, "is not an input of this model")
    return dict(parameters.sampling), merge_timeout(request.timeout(), parameters.timeout_us)


def _lengths(tensors: Tensors) -> dict[str, Any]:
    """How long the answer may be, and what ends it."""
    max_tokens = _scalar(tensors, "max_tokens", np.int32, "INT32")
    if max_tokens is None:
        raise InvalidRequest("max_tokens", "is missing")
    lengths: dict[str, Any] = {"max_tokens": integer("max_tokens", max_tokens, 1, MAX_INT)}
    name, min_tokens = _one_of(tensors, _MIN_TOKENS, np.int32, "INT32")
    if min_tokens is not None:
        lengths["min_tokens"] = integer(name, min_tokens, 0, MAX_INT)
        if min_tokens > max_tokens:
            raise InvalidRequest(name, f"must be at most max_tokens = {max_tokens}, got {min_tokens}")
    end_id = _scalar(tensors, "end_id", np.int32, "INT32")
    if end_id is not None:  # this token ends the answer, and no other does
        lengths["ignore_eos"] = True
        if integer("end_id", end_id, -1, MAX_INT) >= 0:
            lengths["stop_token_ids"] = [end_id]
    return lengths


def _draw(tensors: Tensors) -> dict[str, Any]:
    """How tokens are drawn. Without top_k and top_p, or with both at 0, TensorRT-LLM takes the best one; with one of
    them at 0 the other is the only limit.
    """
    top_k = _scalar(tensors, "top_k", np.int32, "INT32") or 0
    top_p = _real(tensors, "top_p", 0.0, 1.0) or 0.0
    temperature = _real(tensors, "temperature", 0.0, MAX_TEMPERATURE)
    draw: dict[str, Any] = {"top_k": integer("top_k", top_k, 0, MAX_INT), "top_p": top_p or 1.0}
    draw["temperature"] = 0 if not top_k and not top_p else 1.0 if temperature is None else temperature
    for name, (low, high) in _PENALTIES.items():
        if (penalty := _real(tensors, name, low, high)) is not None:
            draw[name] = penalty
    name, seed = _one_of(tensors, _SEED, np.uint64, "UINT64")
    if seed is not None:
        draw["seed"] = integer(name, seed, 0, MAX_SEED)
    return draw


def _words(tensors: Tensors) -> dict[str, Any]:
    return {name: words for name in _WORDS if (words := words_of(tensors, name))}


def _guide(tensors: Tensors) -> dict[str, Any]:
    """The answer's form."""
    kind, guide = (None if (raw := bytes_of(tensors, name)) is None else _text(name, raw) for name in _GUIDE)
    if not kind:
        if guide:
            raise InvalidRequest(_GUIDE[1], f"needs {_GUIDE[0]}")
        return {}
    if kind not in _GUIDES:
        raise InvalidRequest(_GUIDE[0], f"must be one of {', '.join(_GUIDES)}")
    if kind != "json" and not guide:
        raise InvalidRequest(_GUIDE[1], f"is missing: {kind} needs one")
    return {"structured_outputs": {_GUIDES[kind]: True if kind == "json" else guide}}


def _one_of(tensors: Tensors, names: tuple[str, str], dtype: type, triton_type: str) -> tuple[str, Any]:
    """(name, value) of an input with two names; both may be given when they agree."""
    values = {name: value for name in names if (value := _scalar(tensors, name, dtype, triton_type)) is not None}
    if len(set(values.values())) > 1:
        raise InvalidRequest(names[1], f"has another value than {names[0]}, its newer name")
    return next(iter(values.items()), (names[0], None))


def _real(tensors: Tensors, name: str, low: float, high: float) -> float | None:
    value = _scalar(tensors, name, np.float32, "FP32")
    return None if value is None else real(name, value, low, high)


def _scalar(tensors: Tensors, name: str, dtype: type, triton_type: str) -> Any:
    """The only element as Python's number; None when it is not given."""
    array = array_of(tensors, name, dtype, triton_type)
    return None if array is None else only(name, array).item()


def _text(name: str, raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest(name, "is not valid UTF-8") from None
