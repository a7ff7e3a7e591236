"""Reported faults of other servers about prompts, chat templates and the ends a model knows.

ML-03 vllm-project/vllm#4180; CT-01 vllm-project/vllm#16853; CT-02 vllm-project/vllm#7978; CT-03 sgl-project/sglang#892;
CT-04 sgl-project/sglang#3579; RB-02 huggingface/text-generation-inference#1795; RB-06 vllm-project/vllm#24910;
TR-09 triton-inference-server/server PR #2524.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakes.text_requests import feed, validate_request
from fakes.tokenizers import byte_level, byte_level_folder, sentencepiece_folder, write_folder
from minisgl_backend.errors import InvalidRequest
from minisgl_backend.messages.client import Finished, Request
from minisgl_backend.messages.engine import EndReason
from minisgl_backend.messages.ids import RequestId
from minisgl_backend.text.limits import RequestLimits
from minisgl_backend.text.record import Record
from minisgl_backend.text.request import check_request
from minisgl_backend.text.tokenizer import Tokenizer

LIMITS = RequestLimits(context_tokens=2048, pool_tokens=4096)
USER = {"role": "user", "content": "hi"}


def plain(text: str | bytes) -> Request:
    return Request(RequestId(1), text.encode() if isinstance(text, str) else text, b"", False, None)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config": {"eos_token_id": 7}}, (2, 7)),
        ({"config": {"eos_token_id": [7, 2]}}, (2, 7)),
        ({"generation_config": {"eos_token_id": 9}}, (2, 9)),
        ({"config": {"eos_token_id": 7}, "generation_config": {"eos_token_id": [9, 8]}}, (2, 7, 8, 9)),
        ({"config": {"text_config": {"eos_token_id": 7}}}, (2, 7)),
        ({"config": {"eos_token_id": None}, "generation_config": {}}, (2,)),
        ({"tokenizer_config": {}, "config": {"eos_token_id": 7}}, (7,)),
        ({"tokenizer_config": {}, "special_tokens_map": {"eos_token": {"content": "<|endoftext|>"}}}, (0,)),
    ],
)
def test_ml_03_every_end_token_from_every_source_stops(
    tmp_path: Path, files: dict[str, Any], expected: tuple[int, ...]
) -> None:
    tokenizer = Tokenizer.load(byte_level_folder(tmp_path, **files))
    assert tokenizer.eos_token_ids == expected
    assert validate_request(plain("hi"), tokenizer, LIMITS, lambda: 0).stop_token_ids == expected


def test_ml_03_a_model_that_names_no_end_runs_to_its_length(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path, byte_level()))
    accepted = validate_request(plain("hi"), tokenizer, LIMITS, lambda: 0)
    assert (tokenizer.eos_token_ids, accepted.stop_token_ids) == ((), ())
    record = Record(RequestId(1), accepted, tokenizer, 0.0)
    feed(record, [2] * 16)
    record.on_end(EndReason.LENGTH)
    end = record.take_output()
    assert isinstance(end, Finished) and (end.reason, end.num_output_tokens) == ("length", 16)


WITH_BOS = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"


def test_ct_01_bos_stands_once_whoever_writes_it(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(sentencepiece_folder(tmp_path, chat_template=WITH_BOS))
    chat = tokenizer.encode_chat([USER])
    assert chat[0] == 1 and chat.count(1) == 1
    assert tokenizer.encode(tokenizer.render_chat([USER])) == chat
    assert tokenizer.encode("[hi]")[0] == 1


def test_ct_01_a_template_without_bos_is_taken_at_its_word(tmp_path: Path) -> None:
    template = WITH_BOS.removeprefix("{{ bos_token }}")
    tokenizer = Tokenizer.load(sentencepiece_folder(tmp_path, chat_template=template))
    assert 1 not in tokenizer.encode_chat([USER])
    assert tokenizer.encode(tokenizer.render_chat([USER])).count(1) == 1


def test_ct_02_a_model_without_template_says_so_and_still_completes(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(sentencepiece_folder(tmp_path))
    with pytest.raises(InvalidRequest, match=r"^messages: this model has no chat template; .*chat_template\.jinja"):
        tokenizer.render_chat([USER])
    assert validate_request(plain("hi"), tokenizer, LIMITS, lambda: 0).num_input_tokens > 1


def test_ct_03_a_template_that_refuses_a_role_says_why(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no System role') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    tokenizer = Tokenizer.load(byte_level_folder(tmp_path, chat_template=template))
    with pytest.raises(InvalidRequest, match=r"^messages: .*no System role"):
        tokenizer.render_chat([{"role": "system", "content": "x"}, USER])
    assert tokenizer.render_chat([USER]) == "hi"


def test_ct_04_no_messages_are_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"^messages: must be a list of at least one message"):
        byte_level.render_chat([])


@pytest.mark.parametrize("head", ["a", "ab"])
def test_rb_02_long_prompts_of_wide_characters_are_served_at_every_length(tokenizer: Tokenizer, head: str) -> None:
    for size in range(995, 1006):
        text = (head + "你" * (size // 3))[: size // 3]
        accepted = validate_request(plain(text), tokenizer, LIMITS, lambda: 0)
        record = Record(RequestId(1), accepted, tokenizer, 0.0)
        record.on_end(EndReason.LENGTH)
        end = record.take_output()
        assert isinstance(end, Finished) and end.text == text


def test_rb_06_a_huge_prompt_is_refused_before_it_is_tokenised(tokenizer: Tokenizer, monkeypatch: Any) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("tokenised")

    monkeypatch.setattr(Tokenizer, "encode", never)
    most = (LIMITS.context_tokens - 1) * tokenizer.max_token_bytes
    with pytest.raises(InvalidRequest) as caught:
        check_request(plain(b"a" * (20 << 20)), tokenizer, LIMITS)
    assert str(caught.value) == (
        f"text_input: holds {20 << 20} bytes; no prompt of more than {most} bytes fits the limit of 2047 prompt tokens"
    )


@pytest.mark.parametrize("text", ["a\x00b\x00", "é😀", " ", "\n"])
def test_tr_09_text_arrives_byte_for_byte(tokenizer: Tokenizer, text: str) -> None:
    record = Record(RequestId(1), validate_request(plain(text), tokenizer, LIMITS, lambda: 0), tokenizer, 0.0)
    record.on_end(EndReason.LENGTH)
    end = record.take_output()
    assert isinstance(end, Finished) and end.text == text


def test_tr_09_no_text_and_bytes_that_are_no_text_are_refused(tokenizer: Tokenizer) -> None:
    for raw in (b"", b"\xff\xfe"):
        with pytest.raises(InvalidRequest, match=r"^text_input: "):
            check_request(plain(raw), tokenizer, LIMITS)
