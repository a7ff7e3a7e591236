"""A Hugging Face folder of a model that says what a script tells it, for tests of what reaches a client.

It is a real Llama with a real tokenizer, run by the real worker. Its layers add nothing to the residual stream, an
embedding is one-hot, and the LM head maps each token to the one that follows it in a script: so the next token is a
function of the last one alone, whatever the temperature, and a prompt that ends with the character of a script is
answered with that script. A token may be any bytes, so a script cuts characters wherever it likes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from fakes.tokenizers import CHATML, write_folder
from minisgl_backend.models.folder import parse_model_spec
from minisgl_backend.models.tensors import expected_tensors

Scripts = Mapping[str, Sequence[bytes]]
"""The last character of a prompt (ASCII) → the tokens of the answer, after which the model ends. No bytes may stand in
two places, except that a script whose last token is its first one goes on for ever."""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 2
BYTES_FROM = 3  # ids 3 … 258 are the single bytes

_LOUD = 4.0  # a follower's logit is this times √vocabulary, all others' 0: no draw misses it


def write_scripted_model(
    folder: Path,
    scripts: Scripts,
    *,
    style: str = "byte_level",
    context_tokens: int = 512,
    chat_template: str = CHATML,
) -> Path:
    """style: of the tokenizer, "byte_level" or "sentencepiece" (whose tokens are single bytes or whole characters)."""
    ids = ids_of(scripts)
    vocab = BYTES_FROM + len(ids)
    rust = _byte_level(ids) if style == "byte_level" else _sentencepiece(ids)
    names = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2]}
    config = _config(vocab, context_tokens)
    write_folder(folder, rust, config=config, tokenizer_config=names, chat_template=chat_template)
    followers = _followers(scripts, ids, vocab)
    save_file(_weights(config, followers), folder / "model.safetensors", {"format": "pt"})
    return folder


def ids_of(scripts: Scripts) -> dict[bytes, int]:
    """The bytes of every token but the special ones → its id."""
    pieces = dict.fromkeys(piece for script in scripts.values() for piece in script if len(piece) > 1)
    tokens = [*(bytes([byte]) for byte in range(256)), *pieces]
    return {piece: BYTES_FROM + place for place, piece in enumerate(tokens)}


def _followers(scripts: Scripts, ids: Mapping[bytes, int], vocab: int) -> list[int]:
    """token → the token after it; whatever no script names is followed by the end."""
    followers = [EOS_ID] * vocab
    named: set[int] = set()
    for last_character, script in scripts.items():
        chain = [ids[last_character.encode()], *(ids[piece] for piece in script)]
        for token, follower in pairwise(chain):
            assert token not in named, f"{last_character!r}: token {token} is followed by two"
            named.add(token)
            followers[token] = follower
    return followers


def _config(vocab: int, context_tokens: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": vocab,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": context_tokens,
        "tie_word_embeddings": False,
        "eos_token_id": EOS_ID,
        "dtype": "float32",
    }


def _weights(config: dict[str, Any], followers: Sequence[int]) -> dict[str, torch.Tensor]:
    vocab = len(followers)
    weights = {
        name: torch.ones(shape) if name.endswith("norm.weight") else torch.zeros(shape)
        for name, shape in expected_tensors(parse_model_spec(config, {})).items()
    }
    weights["model.embed_tokens.weight"] = torch.eye(vocab)
    weights["lm_head.weight"][torch.tensor(followers), torch.arange(vocab)] = _LOUD
    return weights


def _byte_level(ids: Mapping[bytes, int]) -> RustTokenizer:
    letters = _gpt2_letters()
    vocab = {"".join(letters[byte] for byte in piece): id for piece, id in ids.items()}
    rust = RustTokenizer(models.BPE(vocab={**_special(), **vocab}, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    return _with_special(rust)


def _gpt2_letters() -> list[str]:
    """GPT-2's alphabet, by byte: printable Latin-1 stands for itself, the others follow from U+0100 in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _sentencepiece(ids: Mapping[bytes, int]) -> RustTokenizer:
    vocab = {_piece(piece): id for piece, id in ids.items()}
    rust = RustTokenizer(models.BPE(vocab={**_special(), **vocab}, merges=[], byte_fallback=True))
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with_special(rust)


def _piece(piece: bytes) -> str:
    return f"<0x{piece[0]:02X}>" if len(piece) == 1 else piece.decode().replace(" ", "▁")


def _special() -> dict[str, int]:
    return {token: id for id, token in enumerate(SPECIAL)}


def _with_special(rust: RustTokenizer) -> RustTokenizer:
    rust.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return rust
