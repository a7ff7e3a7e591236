"""One value that a client wrote → a checked number, flag or list, or a refusal that names the field.

Where it stands in the flow: below `text/parameters.py` (in the engine host) and `serving/parameters.py` (in Triton's
stub), so that a value means the same wherever it stands. Values may be numbers or strings: Triton's clients send both.
The messages are plain ASCII of bounded length, whatever the client sent. Light: the stub imports it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from minisgl_backend.errors import InvalidRequest

MAX_INT = 2**31 - 1


def json_object(raw: bytes | str, field: str, max_bytes: int) -> dict[str, Any]:
    """The JSON object `raw`, read by Python's own parser: it takes NaN, so that the refusal can name the key."""
    value = json_value(raw, field, max_bytes)
    if not isinstance(value, dict):
        raise InvalidRequest(field, f"must be a JSON object, got {shown(value)}")
    return value


def json_value(raw: bytes | str, field: str, max_bytes: int) -> Any:
    """Any JSON value, its size bounded before it is parsed. An object that names a key twice is refused."""
    if len(raw) > max_bytes:
        raise InvalidRequest(field, f"must hold at most {max_bytes} bytes, got {len(raw)}")

    def without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise InvalidRequest(field, f"names {shown(twice)} twice")
        return values

    try:
        text = raw if isinstance(raw, str) else raw.decode("utf-8")
        return json.loads(text, object_pairs_hook=without_duplicates)
    except UnicodeDecodeError:
        raise InvalidRequest(field, "is not valid UTF-8") from None
    except json.JSONDecodeError as error:
        raise InvalidRequest(field, f"is not valid JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise InvalidRequest(field, "is nested too deeply") from None
    except ValueError:  # an integer of more digits than Python reads
        raise InvalidRequest(field, "holds an integer with too many digits") from None


_NUMBER = re.compile(r"\s*([+-]?(?:\d{1,40}\.?\d{0,40}|\.\d{1,40})(?:[eE][+-]?\d{1,4})?)\s*", re.ASCII)
_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
_FLAGS = {"true": True, "false": False, "1": True, "0": False}


def number(value: Any) -> int | float | None:
    """A finite number, given as such or as a string; None for anything else."""
    if isinstance(value, str):
        match = _NUMBER.fullmatch(value)
        if match is None:
            return None
        value = int(match[1]) if _INTEGER.fullmatch(match[1]) else float(match[1])
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if isinstance(value, int) or math.isfinite(value) else None


def integer(field: str, value: Any, low: int, high: int) -> int:
    """A whole number in [low, high]."""
    found = number(value)
    if found is None or found != int(found) or not low <= found <= high:
        raise InvalidRequest(field, f"must be an integer from {low} to {high}, got {shown(value)}")
    return int(found)


def real(field: str, value: Any, low: float, high: float, low_excluded: bool = False) -> float:
    """A number in [low, high], or in (low, high]."""
    found = number(value)
    if found is None or not low <= found <= high or (low_excluded and found == low):
        bracket = "(" if low_excluded else "["
        raise InvalidRequest(field, f"must be a number in {bracket}{low:g}, {high:g}], got {shown(value)}")
    return float(found)


def read_flag(value: Any) -> bool | None:
    """true, false, 1, 0, also as strings; None for anything else."""
    return _FLAGS.get(str(value).strip().lower()) if isinstance(value, bool | int | str) else None


def flag(field: str, value: Any) -> bool:
    """A value of `read_flag`, or a refusal."""
    if (found := read_flag(value)) is None:
        raise InvalidRequest(field, f"must be true or false, got {shown(value)}")
    return found


def token_ids(field: str, value: Any, most: int) -> tuple[int, ...]:
    """At most `most` token ids: a list of integers, or a string that holds one as JSON ("[1, 2]")."""
    if isinstance(value, str):
        value = json_value(value, field, 16 * most + 2)
    if not isinstance(value, list | tuple):
        raise InvalidRequest(field, f"must be a list of token ids, got {shown(value)}")
    if len(value) > most:
        raise InvalidRequest(field, f"must hold at most {most} token ids, got {len(value)}")
    for place, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= MAX_INT:
            raise InvalidRequest(
                field, f"must hold integers from 0 to {MAX_INT}, got {shown(token)} at position {place}"
            )
    return tuple(value)


def words(field: str, value: Any, most: int, most_chars: int) -> tuple[str, ...]:
    """A string, which is one word whatever it holds, or a list of strings. An empty string is no word; each stands
    once.
    """
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple):
        raise InvalidRequest(field, f"must be a string or a list of strings, got {shown(value)}")
    for place, word in enumerate(value):
        if not isinstance(word, str):
            raise InvalidRequest(field, f"must hold strings, got {shown(word)} at position {place}")
    found = tuple(dict.fromkeys(word for word in value if word))
    if len(found) > most:
        raise InvalidRequest(field, f"must hold at most {most} strings, got {len(found)}")
    if (chars := sum(map(len, found))) > most_chars:
        raise InvalidRequest(field, f"must hold at most {most_chars} characters, got {chars}")
    refuse_surrogates(field, list(found))
    return found


_TOKEN_ID = re.compile(r"[0-9]{1,10}", re.ASCII)


def biases(field: str, value: Any, most: int, limit: float) -> dict[int, float]:
    """An object of token ids (JSON has strings for keys) and numbers in [-limit, limit], or a string that holds one."""
    given = read_object(field, value)
    if len(given) > most:
        raise InvalidRequest(field, f"must hold at most {most} tokens, got {len(given)}")
    found: dict[int, float] = {}
    for key, bias in given.items():
        token = int(key) if _TOKEN_ID.fullmatch(key) else -1
        if not 0 <= token <= MAX_INT:
            raise InvalidRequest(field, f"must have token ids for keys, got {shown(key)}")
        amount = number(bias)
        if amount is None or not -limit <= amount <= limit:
            raise InvalidRequest(field, f"must hold numbers in [{-limit:g}, {limit:g}], got {shown(bias)} for {token}")
        if token in found:
            raise InvalidRequest(field, f"names the token {token} twice")
        found[token] = float(amount)
    return found


def read_object(field: str, value: Any) -> dict[str, Any]:
    """A JSON object, given as such or as a string that holds one."""
    if isinstance(value, str):
        value = json_object(value, field, len(value))
    if not isinstance(value, dict):
        raise InvalidRequest(field, f"must be an object, got {shown(value)}")
    refuse_surrogates(field, value)
    return value


def text(field: str, value: Any, most: int | None = None) -> str:
    """A string of Unicode characters: no lone surrogates, which JSON can write. `most`: characters."""
    if not isinstance(value, str):
        raise InvalidRequest(field, f"must be a string, got {shown(value)}")
    if most is not None and len(value) > most:
        raise InvalidRequest(field, f"must hold at most {most} characters, got {len(value)}")
    refuse_surrogates(field, value)
    return value


def refuse_surrogates(field: str, value: Any) -> None:
    """JSON can write lone surrogates (\\ud800), which are no characters: no string of a value may hold one."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequest(field, "holds a lone surrogate, which is no character") from None
    except RecursionError:
        raise InvalidRequest(field, "is nested too deeply") from None


def shown(value: Any) -> str:
    """A value for a message: ASCII, short, and never deeper than its own type."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case dict():
            return "an object"
        case list() | tuple():
            return "a list"
        case str():
            return ascii(value[:40]) + ("..." if len(value) > 40 else "")
        case int() if abs(value) >= 10**40:
            return "an integer of more than 40 digits"
        case _:
            return ascii(value)[:60]
