"""Two small tokenizers, built with the `tokenizers` library as real models' files are, and folders that hold them.

Byte-level BPE is what Llama 3, Qwen and SmolLM2 use; the SentencePiece style (▁ for a space, a dummy space in front,
<0x00> … <0xFF> for what has no piece) is Llama 2's and Mistral's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RustTokenizer

from minisgl_backend.text.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog and the smile of the fox",
    "Say: the quick brown fox",
    "    four spaces, then\n\ta newline and a tab",
    "0123456789 plus 1 equals 2; (x + y) * z = [a, b]",
    "你好，世界 가나다 привет мир",
] * 3

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level() -> RustTokenizer:
    """Byte-level BPE of 400 tokens; 0 <|endoftext|>, 1 <|im_start|>, 2 <|im_end|>; adds no BOS."""
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    rust.train_from_iterator(CORPUS, trainer)
    return rust


def sentencepiece() -> RustTokenizer:
    """BPE with byte fallback; 0 <unk>, 1 <s>, 2 </s>, 3 … 258 the bytes, then pieces; puts <s> in front."""
    marks = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    learned = RustTokenizer(models.BPE())
    learned.normalizer = marks
    learned.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    learned.train_from_iterator(CORPUS[:4] * 3, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    model = json.loads(learned.to_str())["model"]

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += sorted(model["vocab"], key=model["vocab"].__getitem__)
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [tuple(pair) for pair in model["merges"]]
    rust = RustTokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    rust.normalizer = marks
    rust.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in pieces[:3]])
    rust.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return rust


def write_folder(folder: Path, rust: RustTokenizer, **files: dict[str, Any] | str) -> Path:
    """Writes tokenizer.json and further files into `folder`: `config={…}` becomes config.json, a string becomes
    `NAME.jinja`. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rust.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        if isinstance(content, str):
            (folder / f"{name}.jinja").write_text(content, encoding="utf-8")
        else:
            (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def byte_level_folder(folder: Path, **files: dict[str, Any] | str) -> Path:
    """A ChatML model of the byte-level kind."""
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    return write_folder(folder, byte_level(), **{"tokenizer_config": named, "chat_template": CHATML, **files})


def sentencepiece_folder(folder: Path, **files: dict[str, Any] | str) -> Path:
    """A base model of the Llama 2 kind, without a chat template."""
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return write_folder(folder, sentencepiece(), **{"tokenizer_config": named, **files})


def ids_of_bytes(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One single-byte token per byte: a script for outputs that cut characters anywhere."""
    return [byte_ids(tokenizer)[byte] for byte in data]


def byte_ids(tokenizer: Tokenizer) -> dict[int, int]:
    """byte → the id of the token that stands for this byte alone; with byte fallback the <0x..> token."""
    found: dict[int, int] = {}
    for i, data in enumerate(tokenizer.shown_bytes):
        if len(data) == 1:
            found.setdefault(data[0], i)
    return found
