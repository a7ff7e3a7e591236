"""A Hugging Face folder → ModelSpec, without transformers and without torch.

Where it stands in the flow: read once by whoever needs the spec, before any weight is touched. A folder that must not
or can not run is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minisgl_backend.errors import ModelUnsupported
from minisgl_backend.models.family import Family
from minisgl_backend.models.fields import ConfigFields
from minisgl_backend.models.files import open_files, read_object
from minisgl_backend.models.registry import FAMILIES, refusal
from minisgl_backend.models.rope_fields import read_ropes
from minisgl_backend.models.spec import LayerSpec, ModelSpec

MOST_TOKENS = 1 << 24
"""Of a vocabulary: far beyond any model, and a bound on what a broken config.json makes everybody allocate."""

_MOST_LAYERS = 1_000  # far beyond any model
_DTYPES = ("float32", "float16", "bfloat16")
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


def read_model_spec(folder: Path) -> ModelSpec:
    """Reads config.json and generation_config.json of the folder, or what stands for them in a GGUF file.

    Raises ModelNotFound when there is no such folder, ModelUnsupported when it needs remote code, is of another
    architecture, or has a field we can not honour; the message names the field.
    """
    files = open_files(folder)
    config = read_object(files, "config.json")
    if config is None:
        raise ModelUnsupported(f"{str(folder)!r} is not a Hugging Face model folder: it has no config.json")
    generation = read_object(files, "generation_config.json") or {}
    return parse_model_spec(config, generation)


def parse_model_spec(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelSpec:
    """The objects of config.json and generation_config.json → ModelSpec; see `read_model_spec`."""
    family = _family(config)
    if packed := config.get("quantization_config"):
        method = packed.get("quant_method") if isinstance(packed, Mapping) else packed
        raise ModelUnsupported(
            f"config.json: quantization_config is not supported, quant_method {method!r}; use an unquantised checkpoint"
        )
    fields = ConfigFields(config, family.defaults)
    return family.declare(fields, _as_llama(fields, generation))


def end_tokens(source: Mapping[str, Any]) -> set[int]:
    """The ids that `eos_token_id` of a config.json or generation_config.json names. Raises ModelUnsupported."""
    value = source.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ModelUnsupported(f"eos_token_id must be an id, a list of ids or null, got {value!r}")
    return set(ids)


def _as_llama(fields: ConfigFields, generation: Mapping[str, Any]) -> ModelSpec:
    """What every family's config.json says in the same words."""
    hidden_size, num_heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    num_kv_heads = fields.positive("num_key_value_heads", num_heads)
    head_dim = fields.positive("head_dim", hidden_size // num_heads)
    num_layers = fields.positive("num_hidden_layers", at_most=_MOST_LAYERS)
    if num_heads % num_kv_heads:
        raise ModelUnsupported(
            f"config.json: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    if head_dim % 2:
        raise ModelUnsupported(f"config.json: head_dim must be even, got {head_dim}")
    ropes = read_ropes(fields, head_dim)
    activation = "hidden_activation" if "hidden_activation" in fields.defaults else "hidden_act"
    return ModelSpec(
        architecture=str(fields.values["architectures"][0]),
        vocab_size=fields.positive("vocab_size", at_most=MOST_TOKENS),
        hidden_size=hidden_size,
        intermediate_size=fields.positive("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.epsilon("rms_norm_eps"),
        context_tokens=min(rope.made_for_tokens(fields.positive("max_position_embeddings")) for rope in ropes),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        layers=(LayerSpec(),) * num_layers,
        ropes=ropes,
        dtype=_dtype(fields.values),
        eos_token_ids=tuple(sorted(end_tokens(fields.values) | end_tokens(generation))),
        activation="silu" if fields.choice(activation, _ACTIVATIONS) == "silu" else "gelu_tanh",
        attention_scale=head_dim**-0.5,
    )


def _family(config: Mapping[str, Any]) -> Family:
    names = config.get("architectures") or []
    named = isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)
    family = FAMILIES.get(names[0]) if named else None
    if config.get("auto_map") and (family is None or config.get("model_type") != family.model_type):
        raise ModelUnsupported("config.json: auto_map asks for code from the model's folder, which is never run here")
    if family is not None:
        return family
    reason = f"supported are: {', '.join(FAMILIES)}"
    if not named:
        raise ModelUnsupported(f"config.json: architectures must name one architecture, got {names!r}; {reason}")
    raise ModelUnsupported(f"architecture {names[0]!r} is not supported; {refusal(names[0]) or reason}")


def _dtype(config: Mapping[str, Any]) -> str:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in _DTYPES:
        raise ModelUnsupported(f"config.json: dtype {name!r} is not supported; {', '.join(_DTYPES)} are")
    return str(name)
