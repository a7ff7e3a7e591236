"""The metadata of a GGUF file → the objects of config.json, generation_config.json and tokenizer_config.json. Pure.

Where it stands in the flow: `gguf_files.py`. From here on a GGUF file is a folder like any other.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from minisgl_backend.errors import ModelUnsupported
from minisgl_backend.models.gguf_families import GGUF_FAMILIES, GgufFamily
from minisgl_backend.models.gguf_file import GgufFile
from minisgl_backend.models.gguf_metadata import check_metadata

_FIELDS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
"""Of config.json → key of the metadata, below the architecture's name."""

_DTYPES = {"F16": "float16", "BF16": "bfloat16"}  # of the embedding; of all other types fp32 loses nothing
_TOKENS = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")
"""Tokens that end an answer in a chat, whose ids converters often leave out: llama.cpp knows them by their text too."""

_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
"""Of all Llama 3.1 to 3.3. A file holds only what comes of them, in `rope_freqs.weight`."""


def gguf_family(file: GgufFile) -> GgufFamily:
    """The declaration of the file's architecture; the types of its metadata are checked. Raises ModelUnsupported."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in GGUF_FAMILIES:
        raise ModelUnsupported(
            f"{file.path.name}: architecture {name!r} is not supported as GGUF; {', '.join(GGUF_FAMILIES)} are"
        )
    check_metadata(file.metadata, name, file.path.name)
    if file.metadata.get("split.count", 0) > 1:
        raise ModelUnsupported(f"{file.path.name} is one of several files; join them with llama-gguf-split --merge")
    return GGUF_FAMILIES[name]


def model_config(file: GgufFile, family: GgufFamily) -> dict[str, Any]:
    """config.json. Raises ModelUnsupported."""
    metadata, name = file.metadata, file.metadata["general.architecture"]
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelUnsupported(f"{file.path.name} holds no weights: it lacks tensor 'token_embd.weight'")
    if metadata.get(f"{name}.expert_count") and "num_experts" not in family.fields:
        raise ModelUnsupported(f"{file.path.name}: experts in architecture {name!r} are not supported as GGUF")
    keys = {**_FIELDS, **family.fields}
    given = {field: plain(metadata.get(f"{name}.{key}")) for field, key in keys.items()}
    return {
        "architectures": [family.architecture],
        "vocab_size": embedding.shape[0],
        **{field: value for field, value in given.items() if value is not None},
        **_rope(file, name, given),
        **_attention_scale(family, given),
        **family.constants,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **token_ids(metadata),
        "dtype": _DTYPES.get(embedding.type.name, "float32"),
    }


def token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json and generation_config.json say of the first token and the ends."""
    ends = {metadata[f"tokenizer.ggml.{key}"] for key in _ENDS if f"tokenizer.ggml.{key}" in metadata}
    tokens: Sequence[str] = metadata.get("tokenizer.ggml.tokens") or ()
    types = metadata.get("tokenizer.ggml.token_type") or ()
    kinds = zip(tokens, types, strict=False)  # of another length: the tokenizer refuses that
    ends |= {i for i, (token, kind) in enumerate(kinds) if kind != _NORMAL and token in _TURN_ENDS}
    ids: dict[str, Any] = {}
    for name, key in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        if f"tokenizer.ggml.{key}_token_id" in metadata:
            ids[name] = metadata[f"tokenizer.ggml.{key}_token_id"]
    if ends:
        ids["eos_token_id"] = sorted(ends) if len(ends) > 1 else min(ends)
    return ids


_NORMAL = 1  # in tokenizer.ggml.token_type


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json, for us and for transformers' generic fast class."""
    tokens: Sequence[str] = metadata.get("tokenizer.ggml.tokens") or ()
    named = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _TOKENS.items()}
    architecture = metadata["general.architecture"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: tokens[i] for name, i in named.items() if i is not None and i < len(tokens)},
        "clean_up_tokenization_spaces": False,
    }
    if context := metadata.get(f"{architecture}.context_length"):
        config["model_max_length"] = context
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


_LARGEST_FP32 = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]


def plain(value: Any) -> Any:
    """A float of the file, which has 32 bits, as its author wrote it: 1e-05, not 9.999999747378752e-06."""
    if not isinstance(value, float) or not abs(value) <= _LARGEST_FP32:
        return value
    exact = _fp32(value)
    return next(short for digits in range(6, 10) if _fp32(short := float(f"{value:.{digits}g}")) == exact)


def _fp32(value: float) -> bytes:
    return struct.pack("<f", value)


def _attention_scale(family: GgufFamily, given: Mapping[str, Any]) -> dict[str, Any]:
    """Gemma's divisor of scores, which no file holds: llama.cpp knows the largest model by its number of layers."""
    if not family.scaled_by_width:
        return {}
    if given.get("num_hidden_layers") == family.scaled_by_width:
        return {"query_pre_attn_scalar": given["hidden_size"] // given["num_attention_heads"]}
    return {"query_pre_attn_scalar": given.get("head_dim")}


def _rope(file: GgufFile, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of config.json that say how positions are scaled."""
    metadata = file.metadata
    if "rope_factors_long.weight" in file.tensors:
        raise ModelUnsupported(f"{file.path.name}: rotary factors for long contexts (longrope) are not read from GGUF")
    fields: dict[str, Any] = {}
    rotary_dim, heads = metadata.get(f"{name}.rope.dimension_count"), given.get("num_attention_heads")
    head_dim = given.get("head_dim") or (given["hidden_size"] // heads if heads and given.get("hidden_size") else None)
    if rotary_dim and head_dim and rotary_dim != head_dim:
        fields["partial_rotary_factor"] = rotary_dim / head_dim
    if "rope_freqs.weight" in file.tensors:
        return {**fields, "rope_scaling": _llama3_scaling(file, name)}
    kind = metadata.get(f"{name}.rope.scaling.type", "none")
    if kind == "none":
        return fields
    scaling = {"rope_type": kind, "factor": plain(metadata.get(f"{name}.rope.scaling.factor"))}
    if kind not in ("linear", "yarn"):
        raise ModelUnsupported(f"{file.path.name}: rotary scaling {kind!r} is not read from GGUF; linear and yarn are")
    if original := metadata.get(f"{name}.rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = original
    return {**fields, "rope_scaling": scaling}


def _llama3_scaling(file: GgufFile, name: str) -> dict[str, Any]:
    """`rope_freqs.weight` divides each frequency. The largest of its values is Llama 3's `factor`; the others must then
    be those of Llama 3, or it is another model's way.
    """
    entry = file.tensors["rope_freqs.weight"]
    if entry.type.name != "F32":
        raise ModelUnsupported(f"{file.path.name}: rope_freqs.weight has type {entry.type.name}; F32 is read")
    with file.path.open("rb") as opened:
        opened.seek(entry.offset)
        divisors = [value for (value,) in struct.iter_unpack("<f", opened.read(entry.size))]
    factor, theta = max(divisors), float(file.metadata.get(f"{name}.rope.freq_base", 10000.0))
    if not (factor > 0 and theta > 0):
        raise ModelUnsupported(f"{file.path.name}: rope_freqs.weight and rope.freq_base must be above 0")
    for i, divisor in enumerate(divisors):
        turns = _LLAMA3_CONTEXT / (2 * math.pi) * theta ** (-i / len(divisors))
        kept = min(max((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0), 1.0)
        if not math.isclose(divisor, 1.0 / ((1.0 - kept) / factor + kept), rel_tol=1e-3):
            raise ModelUnsupported(f"{file.path.name}: rope_freqs.weight does not hold the factors of Llama 3.1 to 3.3")
    return {
        "rope_type": "llama3",
        "factor": plain(factor),
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }
