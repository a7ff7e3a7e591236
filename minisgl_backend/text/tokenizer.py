"""A model's tokenizer: text → tokens, the bytes of each token, the special ids, the chat template.

Where it stands in the flow: loaded once by the text actor from the model's folder and shared, read-only, by every
request. It reads `tokenizer.json` (of a GGUF file: what gguf_tokenizer.py makes) with the `tokenizers` package alone:
importing transformers' classes brings torch into the engine host and costs seconds. No code of the folder is ever run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from minisgl_backend.errors import InvalidRequest, ModelUnsupported
from minisgl_backend.models.files import ModelFiles, open_files, read_object
from minisgl_backend.models.folder import MOST_TOKENS, end_tokens
from minisgl_backend.text.byte_table import token_decoder
from minisgl_backend.text.chat import PLAIN, ChatOptions, check_continued, plain_messages
from minisgl_backend.text.chat_template import ChatTemplate
from minisgl_backend.text.client_template import render_client_template
from minisgl_backend.text.control import END_MARK, ControlWords, pieces
from minisgl_backend.text.tekken import named_tokens, tokenizer_json

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_NORMALIZED_SHRINK = 4  # a Unicode normaliser leaves at least a quarter of the bytes (NFC: 8 → 3; NFKC: 4 → 1)


class Tokenizer:
    """What `text/` knows of a model's vocabulary. Immutable after load: any thread may call any method.

    vocab_size: ids are 0 … vocab_size - 1; the model's own (`config.json`), often padded beyond the tokenizer's
    bos_token_id: the id a prompt may start with, or None
    eos_token_ids: sorted union of the tokenizer's, config.json's and generation_config.json's; may be empty
    special_token_ids: ids that are never shown in text
    all_bytes: per id the bytes of its text, empty for ids without a token; do not change it
    shown_bytes: the same, empty for special ids too
    shown_digest: 16 bytes, of the shown_bytes of all ids below vocab_size
    strips_first_space: a text on its own loses one leading space (SentencePiece)
    max_token_bytes: no token stands for more bytes of prompt text than this
    """

    def __init__(self, rust: RustTokenizer, file: _TokenizerFile, files: _SmallFiles) -> None:
        """For `load`. `rust` is owned by the new object."""
        self._rust = rust
        named = _named_tokens(files.tokenizer_config, files.special_tokens_map)
        _mark_special(rust, named.values())
        self.bos_token_id = rust.token_to_id(named["bos_token"]) if "bos_token" in named else None
        self.eos_token_ids = _union_of_eos(rust, named, files)
        self.special_token_ids = _special_ids(rust)
        decoder = token_decoder(file.decoder)
        self.strips_first_space = decoder.strips_first_space
        strings = _strings_by_id(rust)
        self.vocab_size = _model_vocab_size(files.config) or len(strings)
        self.all_bytes = [b"" if string is None else decoder.to_bytes(string) for string in strings]
        self.all_bytes += [b""] * (self.vocab_size - len(strings))
        self.shown_bytes = [b"" if i in self.special_token_ids else data for i, data in enumerate(self.all_bytes)]
        self.shown_digest = vocabulary_digest(self.shown_bytes[: self.vocab_size])
        self._shown_with: dict[tuple[str, ...], list[bytes]] = {}
        longest = max(map(len, self.all_bytes), default=1)
        self.max_token_bytes = max(longest, 1) * (1 if file.normalizer is None else _NORMALIZED_SHRINK)
        self.has_chat_template = files.template is not None
        self._template = ChatTemplate(files.template or "", named)
        self._control_words = ControlWords(string for i in self.special_token_ids if (string := strings[i]))

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Reads tokenizer.json (or tekken.json, where it is alone) and, where they are, the small JSON files and the
        chat template beside it.

        Raises ModelUnsupported, in one sentence for the operator, when there is no usable tokenizer.
        """
        files = open_files(folder)
        path, raw = _tokenizer_file(files)
        try:
            file = msgspec.json.decode(raw, type=_TokenizerFile)
            rust = RustTokenizer.from_str(raw)
        except Exception as error:  # the tokenizers package raises bare Exception for every fault of the file
            raise ModelUnsupported(f"{path} can not be read as a tokenizer: {error}") from None
        rust.no_truncation()  # a file may ask for it; a prompt must never be cut without a word
        rust.no_padding()
        return cls(rust, file, _SmallFiles.read(files, tekken=path.name == "tekken.json"))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Text → ids. The native part runs without the GIL, so a thread may encode while the loop serves.

        add_special_tokens: put before (and after) the text what the post-processor of tokenizer.json puts there (it
        alone decides, as in transformers 5). A text that already starts with the BOS token is not given a second one.
        """
        ids: list[int] = self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        doubled = add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self.bos_token_id
        return ids[1:] if doubled else ids

    def token_string(self, token_id: int) -> str:
        """As the vocabulary writes it (a space may be `Ġ`); empty for an id of the padding of the vocabulary."""
        return self._rust.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token, special ones included; empty for an id of the padding of the vocabulary."""
        return self.all_bytes[token_id]

    def shown_with(self, texts: tuple[str, ...]) -> list[bytes]:
        """`shown_bytes`, but special tokens of these texts are shown. Made once for the same texts."""
        ids = [i for text in texts if (i := self._rust.token_to_id(text)) in self.special_token_ids]
        if not ids:
            return self.shown_bytes
        table = self._shown_with.get(texts)
        if table is None:
            table = list(self.shown_bytes)
            for i in ids:
                table[i] = self.all_bytes[i]
            self._shown_with[texts] = table
        return table

    @property
    def template_source(self) -> str:
        """Of the model's chat template; empty: it has none."""
        return self._template.source

    def render_chat(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions = PLAIN) -> str:
        """The prompt text of a chat. Encode it with add_special_tokens=False: the template writes its own BOS.

        With a template of the client's it is slow. Raises InvalidRequest naming `messages` (there is no template, or it
        refuses the messages), `chat_template` or `continue_final_message`, UnsupportedFeature naming `tools`.
        """
        if options.continue_final_message:
            messages = plain_messages(messages)
            check_continued(messages)
            messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + END_MARK}]
        if options.template is not None:
            text = render_client_template(options.template, self._template.variables(messages, options))
        elif self.has_chat_template:
            text = self._template.render(messages, options)
        else:
            raise InvalidRequest(
                "messages",
                "this model has no chat template; send text_input, or put a chat_template.jinja into its folder",
            )
        if not options.continue_final_message:
            return text
        text, mark, _ = text.rpartition(END_MARK)
        if not mark:
            raise InvalidRequest("continue_final_message", "the chat template does not write the last message as it is")
        return text.replace(END_MARK, "")

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions = PLAIN, max_chars: int | None = None
    ) -> list[int]:
        """Chat messages → prompt ids. Control tokens in what the client wrote stay words (`text/control.py`), unless
        the options say otherwise.

        Raises what `render_chat` raises, and InvalidRequest for a text of more than max_chars.
        """
        found: list[str] = []
        text = self._render_hidden(messages, options, found)
        if max_chars is not None and len(text) > max_chars:
            raise InvalidRequest("messages", f"the prompt is too long: {len(text)} characters; at most {max_chars} fit")
        if not found:
            return self.encode(text, add_special_tokens=False)
        if not self._joins_exactly:
            raise InvalidRequest(
                "messages", f"hold {found[0]!a}, which this model's tokenizer reads as a control token"
            )
        return [i for piece, is_word in pieces(text, found) for i in self._encode_piece(piece, is_word)]

    def _render_hidden(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions, found: list[str]) -> str:
        """The text with marks for the control words of the client; those words join `found`."""
        messages = plain_messages(messages)
        if options.control_words:
            return self.render_chat(messages, options)
        words = self._control_words
        text = self.render_chat(*_hidden(words, messages, options, found, halves=False))
        more: list[str] = []
        with_halves = _hidden(words, messages, options, more, halves=True)
        if len(more) == len(found):  # as nearly always
            return text
        apart = self.render_chat(*with_halves)
        if words.count(apart) == words.count(text):  # no two halves have met
            return text
        found[:] = more
        return apart

    def _encode_piece(self, piece: str, is_word: bool) -> list[int]:
        """A control word goes character by character: no character is a control token."""
        parts = piece if is_word else (piece,)
        return [i for part in parts for i in self.encode(part, add_special_tokens=False)]

    @cached_property
    def _joins_exactly(self) -> bool:
        """Whether texts that are encoded apart join without a trace: SentencePiece puts a space before each."""
        return b"".join(self.token_bytes(i) for i in self.encode("|", add_special_tokens=False)) == b"|"


def vocabulary_digest(token_bytes: Iterable[bytes]) -> bytes:
    """16 bytes; hashing a large vocabulary takes some hundredths of a second."""
    digest = hashlib.blake2b(digest_size=16)
    for data in token_bytes:
        digest.update(len(data).to_bytes(4, "little") + data)
    return digest.digest()


def _hidden(
    words: ControlWords, messages: Any, options: ChatOptions, found: list[str], *, halves: bool
) -> tuple[Any, ChatOptions]:
    """Messages and options without the control words that the client wrote."""
    messages, tools, arguments = (
        words.hide(value, found, halves=halves) for value in (messages, options.tools, options.arguments)
    )
    return messages, replace(options, tools=tools, arguments=arguments)


class _TokenizerFile(msgspec.Struct):
    """The parts of tokenizer.json that we read ourselves; the vocabulary is skipped."""

    decoder: dict[str, Any] | None = None
    normalizer: dict[str, Any] | None = None


class _SmallFiles(msgspec.Struct, frozen=True):
    """The small files beside tokenizer.json; an absent one is an empty object."""

    tokenizer_config: dict[str, Any]
    special_tokens_map: dict[str, Any]
    config: dict[str, Any]
    generation_config: dict[str, Any]
    template: str | None

    @staticmethod
    def read(files: ModelFiles, *, tekken: bool) -> _SmallFiles:
        tokenizer_config = read_object(files, "tokenizer_config.json") or {}
        if tekken:
            tokenizer_config = named_tokens() | tokenizer_config
        return _SmallFiles(
            tokenizer_config=tokenizer_config,
            special_tokens_map=read_object(files, "special_tokens_map.json") or {},
            config=read_object(files, "config.json") or {},
            generation_config=read_object(files, "generation_config.json") or {},
            template=_template(files, tokenizer_config),
        )


def _tokenizer_file(files: ModelFiles) -> tuple[Path, str]:
    """Where the tokenizer stands, and the text of its tokenizer.json. Raises ModelUnsupported."""
    text = files.text("tokenizer.json")
    if text is not None:
        return files.path / "tokenizer.json", text
    tekken = files.path / "tekken.json"
    if tekken.is_file():
        return tekken, tokenizer_json(tekken)
    others = [name for name in ("tokenizer.model", "vocab.json") if (files.path / name).is_file()]
    hint = f" ({others[0]} alone is not supported: save the fast tokenizer beside it)" if others else ""
    raise ModelUnsupported(f"{files.path} has no tokenizer: tokenizer.json is missing{hint}")


def _template(files: ModelFiles, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The file of its own wins over the entry of tokenizer_config.json; of several named ones, `default`."""
    alone = files.text("chat_template.jinja")
    if alone is not None:
        return alone
    entry = tokenizer_config.get("chat_template")
    if isinstance(entry, list):
        named = [item for item in entry if isinstance(item, dict) and item.get("name") == "default"]
        entry = named[-1].get("template") if named else None
    if entry is not None and not isinstance(entry, str):
        raise ModelUnsupported(f"{files.path}: chat_template in tokenizer_config.json must be a string")
    return entry


def _named_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, … → their text; the first source that names one wins. Entries are strings or AddedToken objects."""
    named: dict[str, str] = {}
    for name in _NAMED:
        for source in sources:
            entry = source.get(name)
            text = entry.get("content") if isinstance(entry, dict) else entry
            if isinstance(text, str):
                named.setdefault(name, text)
    return named


def _mark_special(rust: RustTokenizer, texts: Iterable[str]) -> None:
    """Named tokens are special even where tokenizer.json forgot to say so (as in transformers)."""
    special = {token.content for token in rust.get_added_tokens_decoder().values() if token.special}
    missing = [text for text in texts if text not in special and rust.token_to_id(text) is not None]
    rust.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missing])


def _special_ids(rust: RustTokenizer) -> frozenset[int]:
    return frozenset(i for i, token in rust.get_added_tokens_decoder().items() if token.special)


def _strings_by_id(rust: RustTokenizer) -> list[str | None]:
    vocabulary = rust.get_vocab(with_added_tokens=True)
    strings: list[str | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    for string, i in vocabulary.items():
        strings[i] = string
    return strings


def _model_vocab_size(config: Mapping[str, Any]) -> int | None:
    text_config = config.get("text_config")
    size = (text_config if isinstance(text_config, dict) else config).get("vocab_size", config.get("vocab_size"))
    if isinstance(size, int) and size > MOST_TOKENS:
        raise ModelUnsupported(f"config.json: vocab_size must be at most {MOST_TOKENS}, got {size}")
    return size if isinstance(size, int) and size > 0 else None


def _union_of_eos(rust: RustTokenizer, named: Mapping[str, str], files: _SmallFiles) -> tuple[int, ...]:
    text_config = files.config.get("text_config")
    found = end_tokens(files.config) | end_tokens(files.generation_config)
    found |= end_tokens(text_config) if isinstance(text_config, dict) else set()
    own = rust.token_to_id(named["eos_token"]) if "eos_token" in named else None
    return tuple(sorted(found | ({own} if own is not None else set())))
