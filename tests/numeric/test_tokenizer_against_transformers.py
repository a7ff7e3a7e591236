"""Our light loading of a tokenizer against transformers' generic fast class on the same folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakes.tokenizers import byte_level_folder, sentencepiece_folder
from minisgl_backend.text.chat import ChatOptions
from minisgl_backend.text.detokenizer import decode
from minisgl_backend.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

TEXTS = ["Say: the quick brown fox", "    four\n\tand a tab ", "你好 😀 가나 0123456789", "a<|im_end|>b</s>c <s>d"]
CHAT = [{"role": "system", "content": "be <brief> & kind"}, {"role": "user", "content": "hi 😀"}]
TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}\n  {% if not loop.first %}\n  | {% endif %}\n"
    "{{ m | tojson }}\n{% endfor %}",
    "{% set ns = namespace(last='') %}{% for m in messages %}{% set ns.last = m.content %}{% endfor %}"
    "{{ ns.last | trim }}{{ eos_token }}{% if add_generation_prompt %}>{% endif %}",
]


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast


@pytest.mark.parametrize("make", [byte_level_folder, sentencepiece_folder])
@pytest.mark.parametrize("template", TEMPLATES)
def test_ids_text_and_chat_agree_with_transformers(tmp_path: Path, reference: Any, make: Any, template: str) -> None:
    folder = make(tmp_path, chat_template=template)
    ours, theirs = Tokenizer.load(folder), reference.from_pretrained(folder)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert decode(ours, ids) == theirs.decode(ids, skip_special_tokens=True)
    assert set(ours.special_token_ids) == set(theirs.all_special_ids) | {0, 1, 2}
    for generation in (True, False):
        expected = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=generation)
        assert ours.render_chat(CHAT, ChatOptions(add_generation_prompt=generation)) == expected
    assert ours.encode_chat(CHAT) == theirs.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]


@pytest.mark.parametrize("flags", [{"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}])
def test_the_post_processor_of_the_file_decides_over_the_flags_as_there(
    tmp_path: Path, reference: Any, flags: dict[str, bool]
) -> None:
    named = {"bos_token": "<s>", "eos_token": "</s>", **flags}
    folder = sentencepiece_folder(tmp_path, tokenizer_config=named)
    assert Tokenizer.load(folder).encode("hi") == reference.from_pretrained(folder)("hi")["input_ids"]
