"""A complete Hugging Face folder of a tiny random model: config, safetensors, and a real byte-level BPE tokenizer.

For every test that needs a model to load and run: weights by transformers' own initialiser, so transformers can serve
as the reference, and text goes in and comes out like with a big model. Takes well under a second after the imports.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

EOS_TOKEN = "<|im_end|>"
EOS_ID = 2
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", EOS_TOKEN)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,  # wide enough that the best two logits are rarely within rounding of each other
    "bos_token_id": 1,
    "eos_token_id": EOS_ID,
    "pad_token_id": EOS_ID,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
"""Fields that every config class has."""

_MERGES = (
    "Ġ t|h e|Ġ a|i n|Ġt he|o n|r e|Ġ s|e r|Ġ w|a t|o u|i s|n d|i t|Ġ o|e s|e n|a n|l l|Ġ c|o r|in g|e d|Ġ p|Ġo f|l e"
    "|Ġt o|a r|a l|Ġa nd|i c|o m|Ġ m|Ġ b|Ġ f|Ġ in|Ġ d|c at|Ġc at"
)


def make_tiny_llama(folder: Path | str, *, vocab: int = 320, seed: int = 0, **overrides: Any) -> Path:
    """`make_tiny_model` of a Llama with a tied LM head and two layers; vocab: at least 300."""
    shape = {"vocab_size": vocab, "num_hidden_layers": 2, "tie_word_embeddings": True, **overrides}
    return make_tiny_model(folder, "LlamaForCausalLM", seed=seed, **shape)


def make_tiny_model(folder: Path | str, architecture: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Writes the folder (made when missing) and returns its path.

    architecture: a class of transformers with an LM head. overrides: any field of its config class over those of TINY;
    a vocab_size of at least 300 (259 bytes and special tokens, and some merges). The same arguments give the same bytes
    of weights. No tensor is left as constant as transformers' initialisers make norms, biases and the like: one that a
    loader forgets, or takes twice, shows.
    """
    import torch
    import transformers

    folder = Path(folder)
    settings = {**TINY, **overrides}
    model_class = getattr(transformers, architecture)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(model_class.config_class(**settings))
        _randomise_constants(model)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(getattr(torch, str(settings["dtype"]))).save_pretrained(folder)
    write_tokenizer(folder, vocab=int(settings["vocab_size"]), context=int(settings["max_position_embeddings"]))
    return folder


def write_tokenizer(folder: Path, *, vocab: int, context: int) -> None:
    """tokenizer.json, tokenizer_config.json (generic fast class, with a chat template) and special_tokens_map.json.

    Ids: 0 … 2 special, 3 … 258 the bytes, then merges. Every string round-trips.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pieces = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges: list[tuple[str, str]] = []
    for merge in _MERGES.split("|"):
        left, right = merge.split(" ")
        merges.append((left, right))
        pieces.append(left + right)
    assert len(set(pieces)) == len(pieces) <= vocab, "vocab must be at least 300"
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<|im_start|>", "eos_token": EOS_TOKEN, "pad_token": EOS_TOKEN}
    config = {
        **special,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2), encoding="utf-8")


def _randomise_constants(model: Any) -> None:
    """Adds noise to what the initialisers left at one value: norms at 1 (Gemma's at 0), biases at 0."""
    import torch

    for parameter in model.parameters():
        if parameter.numel() > 1 and parameter.min() == parameter.max():
            with torch.no_grad():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
