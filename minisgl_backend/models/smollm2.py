"""SmolLM2-135M-Instruct: llama.cpp's file (GGUF) → a Hugging Face folder that every transformers since 4.51 loads.

Used by `minisgl fetch smollm2` only. Loads no torch. The weights are dequantised to float32, so they are exactly what
the file says; the tokenizer is rebuilt from the file's vocabulary and merges.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Weight = npt.NDArray[np.float32]

_CONTROL_TOKEN = 3  # in tokenizer.ggml.token_type
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def convert_smollm2(gguf_file: Path, folder: Path, progress: Callable[[int, int], None]) -> None:
    """Writes the Hugging Face folder (which must exist) of `gguf_file`.

    progress(done, total) is called after each tensor. Needs about 0.6 GB of memory and of disk. Raises ValueError
    when the file holds anything but a Llama with tied embeddings and a byte-level BPE tokenizer.
    """
    reader = gguf.GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama" or fields["tokenizer.ggml.model"] != "gpt2":
        raise ValueError(f"{gguf_file.name} holds no Llama with a byte-level BPE tokenizer")
    weights: dict[str, Weight] = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        weights[hf_name(tensor.name)] = np.ascontiguousarray(_unpermuted(tensor.name, values, fields))
        progress(done, len(reader.tensors))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", model_config(fields))
    _write_json(folder / "generation_config.json", _token_ids(fields))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(fields))
    build_tokenizer(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.merges"], _special_ids(fields)).save(
        str(folder / "tokenizer.json")
    )


def hf_name(name: str) -> str:
    """A tensor's name in llama.cpp → its name in transformers. Raises ValueError for one we do not know."""
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"
        case [part, "weight"] if part in _TOP_NAMES:
            return f"{_TOP_NAMES[part]}.weight"
    raise ValueError(f"unknown tensor {name!r}")


def undo_rotary_permutation(weight: Weight, heads: int) -> Weight:
    """Rows of a q or k projection (heads * head_dim, in) from llama.cpp's order to transformers'.

    llama.cpp rotates neighbouring rows (2i, 2i+1) of a head, transformers rows (i, i + head_dim/2); its converter
    interleaves the two halves of every head, and this takes them apart again.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def build_tokenizer(tokens: Sequence[str], merges: Sequence[str], special_ids: Sequence[int]) -> Tokenizer:
    """A byte-level BPE tokenizer in which every digit is a token of its own (llama.cpp's `pre = smollm`).

    tokens: the byte-level piece of each id, in order. merges: "left right", by rank. special_ids: ids that are cut
    out of a text before anything else and are skipped when special tokens are.
    """
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in special_ids])
    return tokenizer


def model_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The file's metadata → `config.json`."""
    heads = int(fields["llama.attention.head_count"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": int(fields["llama.embedding_length"]),
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields["llama.attention.head_count_kv"]),
        "head_dim": int(fields["llama.embedding_length"]) // heads,
        "max_position_embeddings": int(fields["llama.context_length"]),
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        **_token_ids(fields),
        "dtype": "float32",
        "torch_dtype": "float32",  # the name before transformers 4.56
    }


def tokenizer_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The file's metadata → `tokenizer_config.json`, for transformers' generic fast class."""
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": int(fields["llama.context_length"]),
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }


def _unpermuted(name: str, values: Weight, fields: Mapping[str, Any]) -> Weight:
    if name.endswith("attn_q.weight"):
        return undo_rotary_permutation(values, int(fields["llama.attention.head_count"]))
    if name.endswith("attn_k.weight"):
        return undo_rotary_permutation(values, int(fields["llama.attention.head_count_kv"]))
    return values


def _special_ids(fields: Mapping[str, Any]) -> list[int]:
    return [i for i, kind in enumerate(fields["tokenizer.ggml.token_type"]) if kind == _CONTROL_TOKEN]


def _token_ids(fields: Mapping[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(fields["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(fields["tokenizer.ggml.padding_token_id"]),
    }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
