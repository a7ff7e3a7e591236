"""What a model's own generation_config.json says of sampling: the defaults where a request says nothing.

Where it stands in the flow: read once, when the text side of an engine is loaded; the setting `generation_config` turns
it off. As in vLLM, `do_sample` is of no meaning here. Not taken: max_new_tokens, since clients of Triton's vLLM backend
count on 16; end-of-sequence ids are the tokenizer's affair and hold in any case.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from minisgl_backend.errors import InvalidRequest, ModelUnsupported
from minisgl_backend.models.files import open_files, read_object
from minisgl_backend.text.parameters import READERS, SamplingParams

_TAKEN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def sampling_defaults(folder: Path, setting: Literal["auto", "none"]) -> SamplingParams:
    """vLLM's defaults, and over them those of the folder's generation_config.json, if there is one.

    Raises ModelUnsupported, naming the value and the setting, for one that no request could have either.
    """
    given = None if setting == "none" else read_object(open_files(folder), "generation_config.json")
    if given is None:
        return SamplingParams()
    return msgspec.structs.replace(SamplingParams(), **{name: _read(name, given[name]) for name in _named(given)})


def _named(given: dict[str, Any]) -> list[str]:
    return [name for name in _TAKEN if given.get(name) is not None]


def _read(name: str, value: Any) -> Any:
    try:
        return READERS[name](value)
    except InvalidRequest as error:
        raise ModelUnsupported(
            f"generation_config.json: {error}; the setting generation_config = none leaves it aside"
        ) from None
