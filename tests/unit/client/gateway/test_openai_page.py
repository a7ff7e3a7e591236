"""docs/openai.md says what is so: every field with its endpoint, what is passed over, every refusal word for word."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from minisgl_client.gateway.errors import ApiError
from minisgl_client.gateway.fields import NO_EFFECT, REFUSED, ChatBody, CompletionBody, read_body
from minisgl_client.gateway.mapping import plan_chat
from minisgl_client.gateway.tokens import DetokenizeBody, TokenizeBody

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "openai.md").read_text(encoding="utf-8")
USER = {"role": "user", "content": "Hi"}


def table(header: str, page: str = PAGE) -> list[list[str]]:
    """The cells of the rows below a header."""
    rows = page.split(f"{header}\n")[1].splitlines()[1:]
    end = next((at for at, row in enumerate(rows) if not row.startswith("|")), len(rows))
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows[:end]]


def test_every_field_is_told_with_its_endpoint() -> None:
    told = {name: of for names, of, _ in table("| field | of | |") for name in re.findall(r"`(\w+)`", names)}
    completion, chat = {*CompletionBody.__struct_fields__}, {*ChatBody.__struct_fields__}
    assert told == {
        **dict.fromkeys(completion & chat, "both"),
        **dict.fromkeys(completion - chat, "completions"),
        **dict.fromkeys(chat - completion, "chat"),
    }


def test_every_field_of_tokens_is_told_with_its_endpoint() -> None:
    rows = table("| field | of | |", PAGE.split("## Tokens\n")[1])
    told = {name: of.strip("`") for names, of, _ in rows for name in re.findall(r"`(\w+)`", names)}
    assert told == {
        **dict.fromkeys(TokenizeBody.__struct_fields__, "/tokenize"),
        **dict.fromkeys(DetokenizeBody.__struct_fields__, "/detokenize"),
        "model": "both",
    }


def test_what_is_passed_over_is_told() -> None:
    (line,) = [line for line in PAGE.splitlines() if line.startswith("Of no effect here")]
    assert set(re.findall(r"`(\w+)`", line)) == NO_EFFECT


def test_what_is_refused_is_told_with_the_reason() -> None:
    told = {
        name.strip("`"): (off, reason) for name, off, reason in table("| field | asks for nothing | refused with |")
    }
    assert told == {
        name: (", ".join(f"`{json.dumps(value)}`" for value in off), reason) for name, (off, reason) in REFUSED.items()
    }


@pytest.mark.parametrize(
    ("sent", "words"), table("| sent to `/v1/chat/completions` beside `messages` | refused with |")
)
def test_a_refusal_is_word_for_word(sent: str, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        plan_chat(read_body(json.dumps({"messages": [USER], **json.loads(sent.strip("`"))}).encode(), ChatBody))
    assert str(caught.value) == words
