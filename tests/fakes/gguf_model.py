"""A Hugging Face folder of a tiny model → a GGUF file, as llama.cpp's converter writes it.

Names of tensors and keys of the metadata are the gguf package's own, so our maps are compared with somebody else's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

Array = npt.NDArray[Any]
Choose = Callable[[str, Array], gguf.GGMLQuantizationType]
"""(name in llama.cpp, values) → how the tensor is stored."""

ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "Gemma2ForCausalLM": gguf.MODEL_ARCH.GEMMA2,
    "Gemma3ForCausalLM": gguf.MODEL_ARCH.GEMMA3,
    "Olmo2ForCausalLM": gguf.MODEL_ARCH.OLMO2,
    "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
}

_SHIFTED_NORMS = ("Gemma2ForCausalLM", "Gemma3ForCausalLM")
_BLOCK_BYTES = {"Q4_K": 144, "Q6_K": 210}
_CONTROL, _NORMAL = 3, 1


def as_fp32(name: str, values: Array) -> gguf.GGMLQuantizationType:
    """See Choose."""
    return gguf.GGMLQuantizationType.F32


def matrices_as(kind: gguf.GGMLQuantizationType) -> Choose:
    """Norms and biases stay fp32, as in every file of llama.cpp."""
    return lambda name, values: kind if values.ndim > 1 else gguf.GGMLQuantizationType.F32


def write_gguf(folder: Path, path: Path, choose: Choose = as_fp32, *, rope_factor: float = 0.0) -> dict[str, Array]:
    """Writes the file; returns what each tensor then holds in fp32, by llama.cpp's names.

    rope_factor: of Llama 3.1, which a file holds as divisors of the frequencies.
    """
    config = json.loads((folder / "config.json").read_text())
    (architecture,) = config["architectures"]
    kind = ARCHITECTURES[architecture]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[kind])
    _add_shape(writer, config)
    _add_vocabulary(writer, folder)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    held: dict[str, Array] = {}
    for name, values in _experts_together(load_file(folder / "model.safetensors")).items():
        their = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert their is not None, name
        held[their] = _add_tensor(writer, their, _as_theirs(architecture, name, values, config), choose)
    if rope_factor:
        divisors = llama3_divisors(rope_factor, config["rope_parameters"]["rope_theta"], config["head_dim"])
        writer.add_tensor("rope_freqs.weight", divisors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def llama3_divisors(factor: float, theta: float, head_dim: int) -> npt.NDArray[np.float32]:
    """As llama.cpp's converter computes `rope_freqs.weight`: the published rule of Llama 3.1."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4.0:
            divisors.append(1.0)
        elif wavelength > 8192 / 1.0:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def random_blocks(kind: gguf.GGMLQuantizationType, rows: int, columns: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Bytes of a K type [rows, bytes of a row], which the package can read and not write: any bits, small scales."""
    size = _BLOCK_BYTES[kind.name]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows * columns // 256, size), np.uint8)
    scales = random.uniform(1e-4, 2e-3, (len(blocks), 2)).astype(np.float16).view(np.uint8)
    if kind.name == "Q4_K":
        blocks[:, :4] = scales
    else:
        blocks[:, 208:] = scales[:, :2]
    return blocks.reshape(rows, -1)


def _experts_together(weights: Mapping[str, Array]) -> dict[str, Array]:
    """All experts of a layer and product are one tensor there: [experts, out, in]."""
    together: dict[str, list[Array]] = {}
    for name in sorted(weights, key=lambda name: [int(part) if part.isdigit() else -1 for part in name.split(".")]):
        stem = re.sub(r"\.experts\.\d+\.", ".experts.", name)
        together.setdefault(stem, []).append(weights[name])
    return {name: np.stack(parts) if ".experts." in name else parts[0] for name, parts in together.items()}


def _add_shape(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(rope.get("full_attention", rope).get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if config["architectures"][0] in _SHIFTED_NORMS:
        writer.add_sliding_window(config["sliding_window"])
        if config.get("attn_logit_softcapping"):
            writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        if config.get("final_logit_softcapping"):
            writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _add_vocabulary(writer: gguf.GGUFWriter, folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = {
        **tokenizer["model"]["vocab"],
        **{token["content"]: token["id"] for token in tokenizer["added_tokens"]},
    }
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([_CONTROL if token in special else _NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(json.loads((folder / "tokenizer_config.json").read_text())["chat_template"])


def _as_theirs(architecture: str, name: str, values: Array, config: Mapping[str, Any]) -> Array:
    """What the converter does to the values."""
    if architecture == "LlamaForCausalLM" and ".q_proj." in name:
        return permuted(values, config["num_attention_heads"])
    if architecture == "LlamaForCausalLM" and ".k_proj." in name:
        return permuted(values, config["num_key_value_heads"])
    if architecture in _SHIFTED_NORMS and name.endswith("norm.weight"):
        return values + np.float32(1.0)
    return values


def permuted(values: Array, heads: int) -> Array:
    """llama.cpp's row order of a q or k projection: row i of a head's first half, then row i of its second half."""
    rows = values.reshape(heads, 2, -1, *values.shape[1:])
    return np.stack([rows[:, half, i] for i in range(rows.shape[2]) for half in (0, 1)], axis=1).reshape(values.shape)


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: Array, choose: Choose) -> Array:
    kind = choose(name, values)
    if kind.name in _BLOCK_BYTES:
        data = random_blocks(kind, *values.shape, seed=len(name) + values.shape[0])
    else:
        data = gguf.quants.quantize(values, kind)
    writer.add_tensor(name, data, raw_dtype=kind)
    held: Array = gguf.quants.dequantize(data, kind).reshape(values.shape)
    return held
