"""What a model is, read from its Hugging Face folder without transformers and without torch.

Where it stands in the flow: read once by whoever needs the shape, the context limit or the end tokens (text actor,
scheduler's start-up, worker), before any weight is touched. A folder that must not or can not run is refused here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl_backend.errors import ModelNotFound, ModelUnsupported
from minisgl_backend.models.rope import RopeSpec, read_rope

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)

_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape and ends of one model. Field names are ours, values are the checkpoint's."""

    architecture: str  # one of SUPPORTED_ARCHITECTURES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    context_tokens: int  # prompt + output the model was made for
    tie_embeddings: bool  # the LM head is the embedding
    attention_bias: bool  # q, k, v and o have one
    mlp_bias: bool  # gate, up and down have one
    rope: RopeSpec
    dtype: str  # of the checkpoint: "float32", "float16" or "bfloat16"
    eos_token_ids: tuple[int, ...]  # sorted union of config.json and generation_config.json; may be empty


def read_model_spec(folder: Path) -> ModelSpec:
    """Reads config.json and generation_config.json of the folder.

    Raises ModelNotFound when there is no such folder, ModelUnsupported when it needs remote code, is of another
    architecture, or has a field we can not honour; the message names the field.
    """
    if not folder.is_dir():
        raise ModelNotFound(f"there is no model folder {str(folder)!r}")
    config = _read_object(folder / "config.json")
    if config is None:
        raise ModelUnsupported(f"{str(folder)!r} is not a Hugging Face model folder: it has no config.json")
    generation = _read_object(folder / "generation_config.json") or {}
    return parse_model_spec(config, generation)


def parse_model_spec(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelSpec:
    """The objects of config.json and generation_config.json → ModelSpec; see `read_model_spec`."""
    architecture = _architecture(config)
    if config.get("quantization_config"):
        raise ModelUnsupported("config.json: quantization_config is not supported; use an unquantised checkpoint")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelUnsupported(f"config.json: hidden_act {config['hidden_act']!r} is not supported; silu is")
    hidden_size, num_heads = _positive(config, "hidden_size"), _positive(config, "num_attention_heads")
    num_kv_heads = _positive(config, "num_key_value_heads", num_heads)
    head_dim = _positive(config, "head_dim", hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise ModelUnsupported(
            f"config.json: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    if head_dim % 2:
        raise ModelUnsupported(f"config.json: head_dim must be even, got {head_dim}")
    return ModelSpec(
        architecture=architecture,
        vocab_size=_positive(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(config, "intermediate_size"),
        num_layers=_positive(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_epsilon(config),
        context_tokens=_positive(config, "max_position_embeddings", 2048),
        tie_embeddings=_flag(config, "tie_word_embeddings"),
        attention_bias=_flag(config, "attention_bias"),
        mlp_bias=_flag(config, "mlp_bias"),
        rope=read_rope(config),
        dtype=_dtype(config),
        eos_token_ids=tuple(sorted(end_tokens(config) | end_tokens(generation))),
    )


def end_tokens(source: Mapping[str, Any]) -> set[int]:
    """The ids that `eos_token_id` of a config.json or generation_config.json names. Raises ModelUnsupported."""
    value = source.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ModelUnsupported(f"eos_token_id must be an id, a list of ids or null, got {value!r}")
    return set(ids)


def _architecture(config: Mapping[str, Any]) -> str:
    if config.get("auto_map"):
        raise ModelUnsupported("config.json: auto_map asks for code from the model's folder, which is never run here")
    names = config.get("architectures") or []
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelUnsupported(
            f"config.json: architectures must name one architecture, got {names!r}; {supported} runs"
        )
    if names[0] not in SUPPORTED_ARCHITECTURES:
        raise ModelUnsupported(f"architecture {names[0]!r} is not supported; supported are: {supported}")
    return names[0]


def _dtype(config: Mapping[str, Any]) -> str:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in _DTYPES:
        raise ModelUnsupported(f"config.json: dtype {name!r} is not supported; {', '.join(_DTYPES)} are")
    return str(name)


def _positive(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelUnsupported(f"config.json: {key} must be a positive integer, got {value!r}")
    return value


def _epsilon(config: Mapping[str, Any]) -> float:
    value = config.get("rms_norm_eps", 1e-6)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ModelUnsupported(f"config.json: rms_norm_eps must be a small number, got {value!r}")
    return float(value)


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value not in (None, True, False):
        raise ModelUnsupported(f"config.json: {key} must be true or false, got {value!r}")
    return bool(value)


def _read_object(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelUnsupported(f"{path.name} can not be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelUnsupported(f"{path.name} must hold a JSON object")
    return value
