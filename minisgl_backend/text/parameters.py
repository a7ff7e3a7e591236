"""Sampling parameters: the JSON a client sends → checked values → what the workers get.

Where it stands in the flow: `text/request.py` calls `parse_parameters` on Request.parameters and `resolve_sampling`
when the prompt is known; `LLM` builds SamplingParams, sends them as JSON, and so passes the very same checks.

Names and meanings are vLLM's. Values may arrive as numbers or as strings, since that is how Triton's clients send
them. Three things can happen to a key: it is read; it is known but not built, and refused as unsupported unless its
value says "off"; it is unknown, and refused with the nearest known name. Nothing is accepted and ignored.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from minisgl_backend.config import nearest
from minisgl_backend.errors import InvalidRequest, UnsupportedFeature
from minisgl_backend.messages.sampling import Sampling

MAX_PARAMETERS_BYTES = 1 << 20
MAX_TEMPERATURE = 100.0  # far beyond it the distribution is flat; a bound keeps 1e308 from the workers
GREEDY_TEMPERATURE = 1e-4  # below it float32 can not tell a draw from the best token: taken as greedy
MAX_INT = 2**31 - 1
MAX_SEED = 2**63 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request draws its tokens. Checked when a request is made of it, not when it is built."""

    max_tokens: int = 16  # 1 … 2**31 - 1; clipped to what the context leaves
    temperature: float = 1.0  # 0 … 100; 0 (and all below 0.0001) is greedy
    top_k: int = 0  # 0 or -1: no limit; 1 is greedy; more than the vocabulary is no limit
    top_p: float = 1.0  # (0, 1]; 1: no limit
    seed: int | None = None  # 0 … 2**63 - 1; None: one is drawn
    ignore_eos: bool = False  # go on past end-of-sequence tokens

    def to_json(self) -> bytes:
        """The JSON object of Request.parameters. Raises InvalidRequest for a value that JSON can not hold."""
        items: list[str] = []
        for name in self.__struct_fields__:
            try:
                items.append(f'"{name}": {json.dumps(getattr(self, name))}')
            except (TypeError, ValueError, RecursionError):
                kind = type(getattr(self, name)).__name__
                raise InvalidRequest(name, f"has a value of the wrong type: {kind}") from None
        return f"{{{', '.join(items)}}}".encode()


_OFF: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "stop": ([],),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "min_tokens": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "detokenize": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "echo": (False,),
    "guided_decoding": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "response_format": (),
    "json_schema": (),
    "lora_name": (),
    "priority": (0,),
    "deadline_ms": (),
    "cache_salt": (),
    "return_token_ids": (False,),
    "logits_processors": ([],),
    "extra_args": (),
}
"""Known and not built → the values that ask for nothing. null asks for nothing everywhere."""


def parse_parameters(raw: bytes) -> SamplingParams:
    """The sampling parameters of a request: a JSON object in UTF-8, or nothing at all for the defaults.

    Raises InvalidRequest (not such an object, an unknown key, a value out of range) or UnsupportedFeature, each
    naming the field. The messages are plain ASCII of bounded length, whatever the client sent.
    """
    values = _json_object(raw) if raw else {}
    for key, value in values.items():
        if key in _OFF:
            if not _asks_for_nothing(value, _OFF[key]):
                raise UnsupportedFeature(key)
        elif key not in SamplingParams.__struct_fields__:
            name = _shown(key)
            raise InvalidRequest(
                "sampling_parameters", f"unknown parameter {name}{nearest(key[:64], SamplingParams.__struct_fields__)}"
            )
    default = SamplingParams()
    if values.get("max_tokens", 1) is None:
        raise InvalidRequest("max_tokens", f"must not be null; leave it out for {default.max_tokens}")
    given = {key: value for key, value in values.items() if value is not None and key not in _OFF}
    seed = given.get("seed")
    return SamplingParams(
        max_tokens=_integer("max_tokens", given.get("max_tokens", default.max_tokens), 1, MAX_INT),
        temperature=_real("temperature", given.get("temperature", default.temperature), 0.0, MAX_TEMPERATURE),
        top_k=_integer("top_k", given.get("top_k", default.top_k), -1, MAX_INT),
        top_p=_real("top_p", given.get("top_p", default.top_p), 0.0, 1.0, low_excluded=True),
        seed=None if seed is None else _integer("seed", seed, 0, MAX_SEED),
        ignore_eos=_flag("ignore_eos", given.get("ignore_eos", default.ignore_eos)),
    )


def resolve_sampling(params: SamplingParams, vocab_size: int, seed: int) -> Sampling:
    """Checked parameters → the one form the workers know. `seed` stands in when the request names none.

    What can only give the best token becomes plain greedy: a temperature under GREEDY_TEMPERATURE, top_k = 1, and a
    top_p of at most 1/vocab_size (the best token alone has that much).
    """
    seed = seed if params.seed is None else params.seed
    if params.temperature < GREEDY_TEMPERATURE or params.top_k == 1 or params.top_p * vocab_size <= 1.0:
        return Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=seed, sample_index=0)
    top_k = params.top_k if 0 < params.top_k < vocab_size else 0
    return Sampling(temperature=params.temperature, top_k=top_k, top_p=params.top_p, seed=seed, sample_index=0)


# ── reading JSON ─────────────────────────────────────────────────────────────────────────────────────────────────


def _json_object(raw: bytes) -> dict[str, Any]:
    """Python's own parser rather than msgspec's: it reads NaN and Infinity, so that the refusal can name the field."""
    if len(raw) > MAX_PARAMETERS_BYTES:
        raise _bad_object(f"must hold at most {MAX_PARAMETERS_BYTES} bytes, got {len(raw)}")
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except UnicodeDecodeError:
        raise _bad_object("is not valid UTF-8") from None
    except json.JSONDecodeError as error:
        raise _bad_object(f"is not valid JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise _bad_object("is nested too deeply") from None
    except ValueError:  # an integer of more digits than Python reads
        raise _bad_object("holds an integer with too many digits") from None
    if not isinstance(value, dict):
        raise _bad_object(f"must be a JSON object, got {_shown(value)}")
    return value


def _without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise _bad_object(f"names {_shown(key)} twice")
        values[key] = value
    return values


def _bad_object(problem: str) -> InvalidRequest:
    return InvalidRequest("sampling_parameters", problem)


# ── reading one value ────────────────────────────────────────────────────────────────────────────────────────────

_NUMBER = re.compile(r"\s*([+-]?(?:\d{1,40}\.?\d{0,40}|\.\d{1,40})(?:[eE][+-]?\d{1,4})?)\s*", re.ASCII)
_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
_FLAGS = {"true": True, "false": False, "1": True, "0": False}


def _number(value: Any) -> int | float | None:
    """A finite number, given as such or as a string; None for anything else."""
    if isinstance(value, str):
        match = _NUMBER.fullmatch(value)
        if match is None:
            return None
        value = int(match[1]) if _INTEGER.fullmatch(match[1]) else float(match[1])
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if isinstance(value, int) or math.isfinite(value) else None


def _integer(field: str, value: Any, low: int, high: int) -> int:
    number = _number(value)
    if number is None or number != int(number) or not low <= number <= high:
        raise InvalidRequest(field, f"must be an integer from {low} to {high}, got {_shown(value)}")
    return int(number)


def _real(field: str, value: Any, low: float, high: float, low_excluded: bool = False) -> float:
    number = _number(value)
    if number is None or not low <= number <= high or (low_excluded and number == low):
        bracket = "(" if low_excluded else "["
        raise InvalidRequest(field, f"must be a number in {bracket}{low:g}, {high:g}], got {_shown(value)}")
    return float(number)


def _flag(field: str, value: Any) -> bool:
    flag = _FLAGS.get(str(value).strip().lower()) if isinstance(value, bool | int | str) else None
    if flag is None:
        raise InvalidRequest(field, f"must be true or false, got {_shown(value)}")
    return flag


def _asks_for_nothing(value: Any, off_values: tuple[Any, ...]) -> bool:
    return value is None or any(_equals(value, off) for off in off_values)


def _equals(value: Any, off: Any) -> bool:
    if isinstance(off, bool):
        return value is off or (isinstance(value, str) and _FLAGS.get(value.strip().lower()) is off)
    if isinstance(off, int):
        return _number(value) == off
    return type(value) is type(off) and value == off


def _shown(value: Any) -> str:
    """A value for a message: ASCII, short, and never deeper than its own type."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case dict():
            return "an object"
        case list():
            return "a list"
        case str():
            return ascii(value[:40]) + ("..." if len(value) > 40 else "")
        case int() if abs(value) >= 10**40:
            return "an integer of more than 40 digits"
        case _:
            return str(value)
