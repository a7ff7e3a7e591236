"""Text as it leaves the real server, piece by piece, when tokens cut characters and words anywhere.

Cases DT-03 (characters that span tokens), DT-04 (spaces between words), DT-05 (text before a cut character), DT-06
(bytes that are never text), through the raw gRPC stream, /generate_stream and /generate. tests/cases/ shows the same
rules on the text room alone, with more scripts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from fakes.scripted_model import write_scripted_model
from load.serving import PATIENCE_S, Server, serving
from load.streams import MODEL, Answer, ask

FAMILY = "👨‍👩‍👧"  # F0 9F 91 A8 · E2 80 8D · F0 9F 91 A9 · E2 80 8D · F0 9F 91 A7

BYTE_LEVEL = {
    "2": ["😀".encode()[:2], "😀".encode()[2:]],
    "3": ["가나".encode()[:2], "가나".encode()[2:4], "가나".encode()[4:]],
    "4": [bytes.fromhex(part) for part in ("F09F91", "A8E2", "808DF0", "9F", "91", "A9E280", "8DF09F91", "A7")],
    "5": [b" the", b" quick", "  brün".encode(), b"\n\tfox", b" jumps"],
    "6": [b"the smile ", b"\xf0\x9f\x98"],
    "7": [b"good", b"\x80\xbf", b" and", b"\xf8\x41", b" bad"],
}
SENTENCEPIECE = {
    "2": [bytes([byte]) for byte in "😁".encode()],
    "3": [bytes([byte]) for byte in "가é".encode()],
    "4": [bytes([byte]) for byte in "ж你".encode()],
    "5": [b" the", b" quick", "  brün".encode(), b"\n\tfox", b" jumps"],
    "6": [b"the smile ", b"\xf1", b"\x9e"],
    "7": [b"good", b"\x82", b"\xbf", b" and", b"\xf8", b" bad"],
}


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def style(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(style: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp(style) / "model"
    write_scripted_model(folder, BYTE_LEVEL if style == "byte_level" else SENTENCEPIECE, style=style)
    with serving("--model", str(folder), lease_s=2, threads=1) as server:
        yield server


def script(style: str, name: str) -> bytes:
    return b"".join((BYTE_LEVEL if style == "byte_level" else SENTENCEPIECE)[name])


def over_http(server: Server, prompt: str) -> tuple[str, str]:
    """The joined deltas of /generate_stream, and the text of /generate."""
    url = f"{server.http}/v2/models/{MODEL}/"
    body = {"text_input": prompt, "max_tokens": 50, "exclude_input_in_output": True}
    lines = httpx.post(url + "generate_stream", json={**body, "stream": True}, timeout=PATIENCE_S).content.split(
        b"\n\n"
    )
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines if line]
    whole = httpx.post(url + "generate", json=body, timeout=PATIENCE_S).json()
    return "".join(event["text_output"] for event in events), whole["text_output"]


async def check(server: Server, style: str, name: str) -> Answer:
    """The answer to "say N", the same by every way."""
    expected = script(style, name).decode("utf-8", "replace")
    answer = await ask(server.grpc, f"say {name}", max_tokens=50)
    assert (answer.text, answer.reason, answer.finals) == (expected, "stop", 1)
    assert over_http(server, f"say {name}") == (expected, expected)
    return answer


@pytest.mark.parametrize("name", ["2", "3", "4"])
async def test_dt_03_characters_that_span_tokens_arrive_whole(server: Server, style: str, name: str) -> None:
    answer = await check(server, style, name)
    assert not any("\ufffd" in piece for piece in answer.pieces), answer.pieces


async def test_dt_04_words_keep_their_spaces(server: Server, style: str) -> None:
    await check(server, style, "5")


async def test_dt_05_text_before_a_cut_character_is_delivered_and_the_cut_one_shows_once(
    server: Server, style: str
) -> None:
    answer = await check(server, style, "6")
    assert answer.text == "the smile \ufffd"


async def test_dt_05_a_character_cut_by_max_tokens_shows_once(server: Server) -> None:
    answer = await ask(server.grpc, "say 3", max_tokens=1)
    assert (answer.text, answer.reason) == ("\ufffd", "length")


async def test_dt_06_bytes_that_are_never_text_spoil_only_their_own_answer(server: Server, style: str) -> None:
    await check(server, style, "7")
